"""One execution of the flow: analysis, steps of planner, executor and verifier, and the answer."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from argparse import Namespace
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from examples.agentflow.services import Models, ServiceFailure, Settings
from examples.agentflow.tools import LONGEST_RESULT, AgentTool, code_block
from examples.executions import conversation_of, problem_of, response_tokens
from examples.search_r1.answers import targets
from slime.rollout import sglang_rollout
from slime.rollout.environments import ToolError
from slime.rollout.rm_hub.answer_text import final_answer
from slime.rollout.rm_hub.math_utils import extract_boxed_answer
from slime.utils.misc import load_function
from slime.utils.types import Sample

_FIELD = re.compile(r"\**\b(context|sub[- ]?goal|tool[ _]name)\**\s*:\**", re.IGNORECASE)
_CONCLUSION = re.compile(r"conclusion\W*(stop|continue)", re.IGNORECASE)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_VERDICT = re.compile(r"verdict\W*(true|false)", re.IGNORECASE)


@dataclass(frozen=True)
class Plan:
    """The next step that the planner wants; ``tool_name`` is "" when it named none."""

    context: str
    sub_goal: str
    tool_name: str


@dataclass(frozen=True)
class ActionStep:
    """The part of a step that the memory keeps."""

    tool_name: str
    sub_goal: str
    command: str
    result: str
    failed: bool
    """Because of what the agents did: an unknown tool, a call that cannot be read, an error of the tool."""


def parse_plan(text: str, query: str) -> Plan:
    """Return the fields of the planner's turn: of a JSON object, else the last of each name before a colon.

    Without a sub-goal the ``query`` is it.
    """
    found = _json_fields(text)
    if not found:
        marks = list(_FIELD.finditer(text))
        for mark, following in zip_longest(marks, marks[1:]):
            end = following.start() if following else len(text)
            found[re.sub(r"[\W_]", "", mark[1].lower())] = text[mark.end() : end].strip()
    name = next(iter(found.get("toolname", "").splitlines()), "").strip(" \t`*\"'.")
    return Plan(found.get("context", ""), found.get("subgoal") or query, name)


def _json_fields(text: str) -> dict[str, str]:
    try:
        read = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except ValueError:
        return {}
    return {key.replace("_", ""): str(value) for key, value in read.items()} if "tool_name" in read else {}


def same_name(name: str) -> str:
    """Return a tool's name as it is compared: without case, blanks and underscores."""
    return re.sub(r"[\s_]", "", name).lower()


def arguments_of(command: str) -> dict[str, Any]:
    """Return the keywords of the last ``tool.execute(...)`` in ``command``; they must be literals. Raises ToolError."""
    try:
        calls = [
            node for node in ast.walk(ast.parse(command))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "execute"
        ]  # fmt: skip
        call = max(calls, key=lambda node: (node.lineno, node.col_offset))
        if call.args:
            raise ValueError("arguments without a name")
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, SyntaxError, MemoryError, RecursionError) as e:
        raise ToolError(f'expected one call, execution = tool.execute(query="..."), of literals: {e}') from None


class Flow:
    """One execution. ``samples`` are the policy's turns, ``steps`` the memory; ``answer`` is what the flow says."""

    def __init__(
        self, args: Namespace, settings: Settings, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
    ) -> None:
        self.args, self.settings, self.sample, self.evaluation = args, settings, sample, evaluation
        self.params = {**sampling_params, "max_new_tokens": settings.planner_tokens}
        self.models = Models(args, settings)
        self.tools: list[AgentTool] = [load_function(path)(args, settings) for path in settings.tools]
        self.query = problem_of(sample)
        self.samples: list[Sample] = []
        self.steps: list[ActionStep] = []
        self.answer = ""

    async def run(self) -> None:
        """Run it; it ends early when the policy's turn is ABORTED. Raises ServiceFailure."""
        about = {"query": self.query, "tools": "\n".join(map(self._described, self.tools))}
        if self.settings.train_analysis:
            analysis = await self._turn("analysis", **about)
        else:
            analysis = await self.models.ask(self.settings.executor, "analysis", **about)
        names = ", ".join(tool.name for tool in self.tools)
        while not self._aborted and len(self.steps) < self.settings.max_steps:
            said = await self._turn("planner", **about, analysis=analysis, tool_names=names, steps=self._memory())
            if self._aborted or not self.samples[-1].response_length:  # no room is left for an answer
                break
            self.steps.append(await self._step(parse_plan(said, self.query)))
            verdict = await self.models.ask(
                self.settings.executor, "verifier", **about, analysis=analysis, steps=self._memory()
            )
            conclusions = _CONCLUSION.findall(verdict)
            if conclusions and conclusions[-1].lower() == "stop":
                break
        if not self._aborted:
            self.answer = await self.models.ask(self.settings.executor, "final", query=self.query, steps=self._memory())

    @property
    def _aborted(self) -> bool:
        return bool(self.samples) and self.samples[-1].status == Sample.Status.ABORTED

    def _described(self, tool: AgentTool) -> str:
        return self.settings.prompts["tool"].format(**tool.metadata())

    def _memory(self) -> str:
        text = self.settings.prompts["step"]
        return "\n".join(text.format(number=number, **vars(step)) for number, step in enumerate(self.steps, 1))

    async def _turn(self, prompt: str, **fields: Any) -> str:
        """Let the policy answer ``prompts[prompt]``; its sample is trained on. Return what it says."""
        tokenizer = sglang_rollout.GenerateState(self.args).tokenizer
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": self.settings.prompts[prompt].format(**fields)}],
            tokenize=False, add_generation_prompt=True, **(self.args.apply_chat_template_kwargs or {}),
        )  # fmt: skip
        ids = tokenizer.encode(rendered, add_special_tokens=False)
        one = conversation_of(self.sample, ids, agent=prompt)
        self.samples.append(one)
        await sglang_rollout.generate(self.args, one, dict(self.params), self.evaluation)
        return final_answer(tokenizer.decode(response_tokens(tokenizer, one)))

    async def _step(self, plan: Plan) -> ActionStep:
        """Let the executor write the command of a plan, and run it."""
        command, failed = "", True
        tool = next((one for one in self.tools if same_name(one.name) == same_name(plan.tool_name)), None)
        if tool is None:
            known = ", ".join(one.name for one in self.tools)
            result = f"error: there is no tool {plan.tool_name!r}; the tools are {known}"
        else:
            command = code_block(
                await self.models.ask(
                    self.settings.executor, "executor", query=self.query, sub_goal=plan.sub_goal, context=plan.context,
                    tool=self._described(tool), tool_name=tool.name, steps=self._memory(),
                )
            )  # fmt: skip
            try:
                result, failed = await self._execute(tool, arguments_of(command)), False
            except ToolError as e:
                result = f"error: {e}"
        name = plan.tool_name if tool is None else tool.name
        return ActionStep(name, plan.sub_goal, command, result[:LONGEST_RESULT], failed)

    async def _execute(self, tool: AgentTool, arguments: dict[str, Any]) -> str:
        try:
            call = tool.execute(**arguments)
        except TypeError as e:  # the arguments do not fit
            raise ToolError(f"{tool.name} takes {tool.input_types}: {e}") from None
        try:
            async with asyncio.timeout(self.settings.tool_timeout):
                return str(await call)
        except (ToolError, ServiceFailure):
            raise
        except TimeoutError as e:
            limit = f"took more than {self.settings.tool_timeout:g} s (agentflow_tool_timeout)"
            raise ServiceFailure(tool.name, limit) from e
        except Exception as e:  # whatever a user's tool raises
            raise ServiceFailure(tool.name, f"raised {e!r}") from e

    async def is_right(self) -> bool:
        """Return whether the answer equals one of the label's, or means the same to the judge. Raises ServiceFailure.

        The answer is the last ``<answer>``, else all that was said; of one with a box, what is in that. Compared
        literally it may differ in case and blanks alone: without punctuation -1.5 would be 15.
        """
        said = _ANSWER.findall(self.answer)
        given = (said[-1] if said else self.answer).strip()
        right = targets(self.sample.label)
        literal = (extract_boxed_answer(given) or given).lower().split()
        if any(literal == target.lower().split() for target in right):
            return True
        if self.settings.judge is None:
            return False
        verdict = await self.models.ask(
            self.settings.judge, "judge", query=self.query, label=" or ".join(right), answer=given
        )
        found = _VERDICT.findall(verdict)
        return bool(found) and found[-1].lower() == "true"
