"""An agent of the OpenAI Agents SDK that answers questions with a search tool, and says how well it did.

    python -m examples.openai_agents.agent --gateway http://127.0.0.1:8890 < tasks.jsonl

It knows nothing of slime, and none of it is imported: the gateway is an API of OpenAI's that also opens and finishes
sessions. Every line of standard input is a task, ``{"instance_id", "question", "label", "attempts"}``. An attempt is a
session, finished with reward 1 for a right answer, else 0. One that the gateway or the search engine fails is dropped,
so that nothing of it is trained on, and made again; after three of those the program ends with status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import httpx
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    UserError,
    function_tool,
    set_tracing_disabled,
)
from openai import APIConnectionError, APIStatusError, AsyncOpenAI

from examples.search_r1.answers import is_right

TRIES = 3
LONG_S = 1800.0
"""A request may wait as long: for weights that are being updated, or for room in the rollout buffer."""


class ServiceFailure(Exception):
    """A failure that was not the model's fault."""


@dataclass(frozen=True)
class Settings:
    """Settings of an agent; the defaults of the command line are read from variables of the environment."""

    gateway: str
    search_url: str
    topk: int
    max_turns: int
    instructions: str | None
    api: str
    sampling_params: dict[str, Any]


class Attempts:
    """Makes attempts at tasks against one gateway."""

    def __init__(self, settings: Settings, http: httpx.AsyncClient) -> None:
        self.settings, self.http = settings, http
        self.openai = AsyncOpenAI(
            base_url=f"{settings.gateway}/v1", api_key="none", http_client=http, max_retries=0, timeout=LONG_S
        )

    async def search(self, query: str) -> str:
        """Return the contents of the best documents, one a line."""
        body = {"queries": [query], "topk": self.settings.topk}
        try:
            reply = await self.http.post(self.settings.search_url, json=body, timeout=60.0)
            reply.raise_for_status()
        except httpx.HTTPError as e:
            raise ServiceFailure(f"the search engine at {self.settings.search_url}: {e!r}") from e
        return "\n".join(" ".join(document["contents"].split("\n")[1:]) for document in reply.json()["result"][0])

    def agent(self, sid: str) -> Agent[Any]:
        """Return an agent whose requests belong to the session ``sid``."""

        async def search(query: str) -> str:
            """Search for documents.

            Args:
                query: words to look for
            """
            return await self.search(query)

        kind = {"responses": OpenAIResponsesModel, "chat_completions": OpenAIChatCompletionsModel}[self.settings.api]
        model = kind(model="actor", openai_client=self.openai.with_options(api_key=sid))
        tool = function_tool(search, failure_error_function=None)  # what fails is not shown to the model
        return Agent(name="searcher", instructions=self.settings.instructions, model=model, tools=[tool])

    async def reward(self, sid: str, task: dict[str, Any]) -> float:
        """Let the agent answer; return 1 when it is right. What the model does wrong is worth 0."""
        try:
            done = await Runner.run(self.agent(sid), task["question"], max_turns=self.settings.max_turns)
        except (MaxTurnsExceeded, ModelBehaviorError):  # too long; an unknown tool, arguments that are no JSON
            return 0.0
        except UserError as e:  # what a tool raises is wrapped
            raise e.__cause__ if isinstance(e.__cause__, ServiceFailure) else e from None
        except (APIConnectionError, APIStatusError) as e:
            if getattr(e, "code", None) == "context_length_exceeded":
                return 0.0
            raise ServiceFailure(f"the gateway at {self.settings.gateway}: {e!r}") from e
        return float(is_right(str(done.final_output), task["label"]))

    async def attempt(self, task: dict[str, Any]) -> None:
        """Make one attempt, again where a service failed. Raises ServiceFailure after the last of ``TRIES``."""
        for left in range(TRIES - 1, -1, -1):
            try:
                opened = await self._control("POST", "/sessions", instance_id=task["instance_id"],
                                             sampling_params=self.settings.sampling_params)  # fmt: skip
                sid = opened["session_id"]
                try:
                    reward = await self.reward(sid, task)
                except ServiceFailure:
                    await self._control("DELETE", f"/sessions/{sid}")
                    raise
                finished = await self._finish(sid, reward)
            except ServiceFailure as e:
                if not left:
                    raise
                print(f"made again: {e}", file=sys.stderr, flush=True)
                await asyncio.sleep(1.0)
                continue
            print(json.dumps({"instance_id": task["instance_id"], "reward": reward, **finished}), flush=True)
            return

    async def _finish(self, sid: str, reward: float) -> dict[str, Any]:
        while True:
            try:
                return await self._control("POST", f"/sessions/{sid}/finish", reward=reward)
            except ServiceFailure as e:
                if "finish it again" not in str(e):  # the buffer is full as long as no process reads from it
                    raise

    async def _control(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        key = os.environ.get("SLIME_ROLLOUT_BUFFER_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{self.settings.gateway}{path}"
        try:
            reply = await self.http.request(method, url, json=body, headers=headers, timeout=LONG_S)
        except httpx.HTTPError as e:
            raise ServiceFailure(f"the gateway at {self.settings.gateway}: {e!r}") from e
        if reply.is_error:
            raise ServiceFailure(f"the gateway at {url}: {reply.status_code} {reply.text:.300}")
        found: dict[str, Any] = reply.json()
        return found


async def make_attempts(settings: Settings, concurrency: int) -> None:
    """Read tasks from standard input, as fast as attempts at them end, until its end."""
    slots = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=2 * concurrency)
    async with httpx.AsyncClient(limits=limits, trust_env=False) as http, asyncio.TaskGroup() as group:
        attempts = Attempts(settings, http)

        async def one(task: dict[str, Any]) -> None:
            try:
                await attempts.attempt(task)
            finally:
                slots.release()

        while line := await asyncio.to_thread(sys.stdin.readline):
            task = json.loads(line)
            for _ in range(task.get("attempts", 1)):
                await slots.acquire()
                group.create_task(one(task))


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    env = os.environ.get
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gateway", required=True, help="URL")
    add("--search-url", default=env("AGENT_SEARCH_URL", "http://127.0.0.1:8000/retrieve"))
    add("--topk", type=int, default=int(env("AGENT_TOPK", "3")), help="documents (default: %(default)s)")
    add("--max-turns", type=int, default=int(env("AGENT_MAX_TURNS", "4")), help="(default: %(default)s)")
    add("--instructions", default=env("AGENT_INSTRUCTIONS"), help="the system's message")
    add("--api", choices=("responses", "chat_completions"), default=env("AGENT_API", "responses"))
    add("--sampling-params", type=json.loads, default={}, help="JSON, of the engine")
    add("--concurrency", type=int, default=int(env("AGENT_CONCURRENCY", "32")), help="(default: %(default)s)")
    return parser


def main() -> int:
    words = vars(make_parser().parse_args())
    concurrency = words.pop("concurrency")
    set_tracing_disabled(True)
    status = 0
    try:
        asyncio.run(make_attempts(Settings(**words), concurrency))
    except* ServiceFailure as failures:
        print(f"ended after {TRIES} tries: {failures.exceptions[0]}", file=sys.stderr)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
