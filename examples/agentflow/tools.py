"""The tools that the planner chooses from: classes that ``agentflow_tools`` names by dotted path."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from typing import Any, ClassVar

from examples.agentflow.services import Models, ServiceFailure, Settings
from examples.retool.interpreter import interpret
from examples.search_r1.environment import shown
from slime.rollout.rm_hub.failure import RewardFailure
from slime.utils.http_utils import HttpRequestError, post

LONGEST_RESULT = 100_000
"""Characters."""
CODE_SECONDS = 10.0
_BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


def code_block(text: str) -> str:
    """Return the last fenced block of ``text``, or all of it without one."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1] if blocks else text).strip()


class AgentTool:
    """A tool. The fields of its metadata are what the prompts of planner and executor contain of it.

    ``execute`` returns its result as a text, or raises ToolError for what the agents did wrong, which is a result too.
    Whatever else it raises is a failure of the service.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    input_types: ClassVar[str] = "query: str"
    output_type: ClassVar[str] = "str"
    demo_commands: ClassVar[str] = 'execution = tool.execute(query="...")'
    limitations: ClassVar[str] = "none that are known"
    best_practice: ClassVar[str] = "give it all that it needs to know"

    def __init__(self, args: Namespace, settings: Settings) -> None:
        self.args, self.settings = args, settings
        self.models = Models(args, settings)

    async def execute(self, **arguments: Any) -> str:
        """Return the result of a call."""
        raise NotImplementedError(f"{type(self).__name__} has no method execute")

    def metadata(self) -> Mapping[str, str]:
        """Return the fields of ``agentflow_prompts``' ``tool``."""
        fields = ("description", "input_types", "output_type", "demo_commands", "limitations", "best_practice")
        return {"name": self.name, **{field: str(getattr(self, field)) for field in fields}}


class BaseGenerator(AgentTool):
    """The executor's model, asked directly."""

    name = "base_generator"
    description = "Answers a question or follows an instruction by itself, step by step."
    limitations = "knows nothing of recent events, and makes mistakes in long calculations"
    best_practice = "use it for reasoning and for simple questions"

    async def execute(self, query: str) -> str:  # type: ignore[override]
        return await self.models.ask(self.settings.executor, "base_generator", query=query)


class PythonCoder(AgentTool):
    """Another model writes a program, which is run with the limits of ``examples/retool``."""

    name = "python_coder"
    description = "Writes a Python program for a task, runs it and returns what it prints."
    limitations = "modules of mathematics only, no files, no network, ten seconds"
    best_practice = "use it for calculations, and state the task with all of its numbers"

    def __init__(self, args: Namespace, settings: Settings) -> None:
        super().__init__(args, settings)
        self.models.url(settings.coder)  # say at once that there is none

    async def execute(self, query: str) -> str:  # type: ignore[override]
        code = code_block(await self.models.ask(self.settings.coder, "python_coder", query=query))
        try:
            return (await interpret(code, cpu_s=CODE_SECONDS))[0]
        except RewardFailure as e:
            raise ServiceFailure("python_coder", str(e)) from e


class WikipediaSearch(AgentTool):
    """A retrieval server with the interface of Search-R1's, at ``agentflow_search_url``."""

    name = "wikipedia_search"
    description = "Finds passages of Wikipedia."
    limitations = "returns passages, not answers"
    best_practice = "search for names and terms, one at a time"

    def __init__(self, args: Namespace, settings: Settings) -> None:
        super().__init__(args, settings)
        if settings.search_url is None:
            raise ValueError("wikipedia_search needs agentflow_search_url, the /retrieve of a retrieval server")
        self.url = settings.search_url

    async def execute(self, query: str) -> str:  # type: ignore[override]
        asked = {"queries": [query], "topk": 3, "return_scores": True}
        try:
            reply = await post(self.url, asked, self.settings.model_attempts, timeout=self.settings.tool_timeout)
            return shown(reply["result"][0])
        except (HttpRequestError, LookupError, TypeError) as e:
            raise ServiceFailure("wikipedia_search", f"{self.url}: {e!r}") from e
