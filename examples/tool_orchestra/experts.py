"""The other models, and what they cost."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from examples.tool_orchestra.settings import Settings, Task
from slime.rollout.rm_hub.answer_text import final_answer
from slime.utils.http_utils import HttpRequestError, post

RETRIES = 5
PROMPTS = {
    "search": "{state}\n\nWrite one search query that finds what is missing to solve the problem, and nothing else.",
    "enhance_reasoning": (
        "{state}\n\nWrite a Python program that computes what is missing to solve the problem, and prints it. Write "
        "the program only."
    ),
    "answer": "{state}\n\nSolve the problem. End with the answer alone, in <answer> and </answer>.",
    "judge": (
        "Question:\n{problem}\n\nRight answer:\n{label}\n\nAnswer to grade:\n{answer}\n\nIs the answer to grade right? "
        "Say yes or no."
    ),
}


class ServiceFailure(Exception):
    """A model or a tool did not do its work: not the fault of the model that is trained."""


@dataclass
class Spent:
    """Resources that an execution has used: price, seconds, and calls by the name of the model."""

    cost: float = 0.0
    latency: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)

    def features(self, task: Task, correct: bool) -> dict[str, float]:
        """Return what preferences weigh: more is better of all of them."""
        counts = {alias: float(self.calls[alias]) for alias in task.models}
        return {**counts, "accuracy": float(correct), "cost": -self.cost, "latency": -self.latency}


async def request(what: str, url: str, payload: Any, timeout: float) -> Any:
    """POST to a service. Raises ServiceFailure, with what it was, when there is no answer in ``timeout`` s."""
    try:
        return await post(url, payload, max_retries=RETRIES, timeout=timeout)
    except HttpRequestError as e:
        raise ServiceFailure(f"{what} at {url}: {e}") from e


@dataclass
class Experts:
    """Calls models for one execution and adds up what they cost."""

    args: Namespace
    settings: Settings
    task: Task
    spent: Spent = field(default_factory=Spent)

    async def ask(self, alias: str, messages: list[dict[str, Any]], **options: Any) -> Mapping[str, Any]:
        """Return the message that the model ``alias`` answers with; its price and its time are the execution's."""
        model = self.task.models[alias]
        pricing = self.task.pricing.get(model, {})
        body = {"model": model, "messages": messages, "max_tokens": self.settings.max_tokens, **options}
        began = time.monotonic()
        reply = await request(model, self.settings.url(self.args, model), body, self.settings.call_s)
        usage = reply.get("usage") or {}
        prices = (("prompt_tokens", "input"), ("completion_tokens", "output"))
        self.spent.cost += sum(usage.get(name, 0) * pricing.get(price, 0.0) for name, price in prices) / 1e6
        self.spent.latency += pricing.get("latency", time.monotonic() - began)
        self.spent.calls[alias] += 1
        message: Mapping[str, Any] = reply["choices"][0]["message"]
        return message

    async def say(self, alias: str, prompt: str, **parts: str) -> str:
        """Return the text of a model's answer to one of ``PROMPTS``, without its reasoning."""
        message = await self.ask(alias, [{"role": "user", "content": PROMPTS[prompt].format(**parts)}])
        return final_answer(message.get("content") or "").strip()

    async def documents(self, query: str) -> list[str]:
        """Return what the search engine finds, each document cut to its limit."""
        body = {"queries": [query], "topk": self.settings.topk, "return_scores": True}
        reply = await request("retrieval", self.settings.retrieval, body, self.settings.call_s)
        contents = [hit.get("document", hit)["contents"] for hit in reply["result"][0]]
        return [text[: self.settings.document_chars] for text in contents]

    async def judge(self, label: str, answer: str) -> bool:
        """Return whether the judge calls an answer right; its cost is not counted."""
        model = self.settings.judge
        text = PROMPTS["judge"].format(problem=self.task.problem, label=label, answer=answer)
        body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 1024}
        reply = await request(model, self.settings.url(self.args, model), body, self.settings.call_s)
        return final_answer(reply["choices"][0]["message"]["content"]).strip().lower().startswith("yes")


async def working(what: str, work: Any) -> Any:
    """Await ``work``. Whatever it raises is a ServiceFailure of ``what``."""
    try:
        return await work
    except Exception as e:
        raise ServiceFailure(f"{what}: {e!r}") from e


async def within(seconds: float, work: Any) -> Any:
    """Await ``work``. Raises ServiceFailure when it takes longer."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise ServiceFailure(f"an execution took more than {seconds:g} s") from None
