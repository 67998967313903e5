"""The small version's world, tools, and the rules that stand in the place of the models that are not trained."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar

from aiohttp import web

from examples.agentflow.tools import AgentTool
from slime.rollout.environments import ToolError

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
KINDS = ("value", "value friend", "value friend friend", "next value", "next value friend")
"""Questions about somebody: the words are the tools that lead there, from the last to the first."""


def people() -> dict[str, tuple[str, str]]:
    """Return {name: (friend, value)}, which do not depend on any seed; values have two digits."""
    rng = random.Random(20)
    names = [c + v for c in _CONSONANTS for v in _VOWELS]
    return {
        name: (rng.choice([other for other in names if other != name]), f"{rng.randrange(99):02d}") for name in names
    }


PEOPLE = people()


def plan_for(query: str) -> list[str]:
    """Return the tools that answer ``query``, in the order of their use."""
    return query.split()[-2::-1]


def answer_to(query: str) -> str:
    """Return the right answer."""
    found = query.split()[-1]
    for tool in plan_for(query):
        found = _FUNCTIONS[tool](found)
    return found


def _known(name: str) -> tuple[str, str]:
    if name not in PEOPLE:
        raise ToolError("unknown name")
    return PEOPLE[name]


def _next(number: str) -> str:
    if not number.isdecimal():
        raise ToolError("not a number")
    return f"{int(number) + 1:02d}"


_FUNCTIONS: dict[str, Callable[[str], str]] = {
    "value": lambda name: _known(name)[1], "friend": lambda name: _known(name)[0], "next": _next,
}  # fmt: skip


class _WorldTool(AgentTool):
    name: ClassVar[str]
    input_types = "key: str"

    async def execute(self, key: str) -> str:  # type: ignore[override]
        return _FUNCTIONS[self.name](key)


class Value(_WorldTool):
    """Somebody's number."""

    name = "value"
    description = "The value of somebody."


class Friend(_WorldTool):
    """Somebody's friend."""

    name = "friend"
    description = "The friend of somebody."


class Next(_WorldTool):
    """A number and one."""

    name = "next"
    description = "The number after a number."
    input_types = "key: str, a number"


def ruled(prompt: str) -> str:
    """Return what a model that is not trained answers to a prompt of ``small.yaml``.

    The executor calls the tool with the latest result, the verifier stops when that is of the kind that the query asks
    for, and the generator answers with it; none of them helps the planner.
    """
    role, query, steps = prompt.split("|", 2)
    taken = [step.rpartition("=")[::2] for step in steps.splitlines()]
    results = [(tool, result) for tool, result in taken if result in PEOPLE or result.isdecimal()]
    tool, latest = results[-1] if results else ("", query.split()[-1])
    if role == "execute":
        return f"execution = tool.execute(key={latest!r})"
    if role == "verify":
        return f"Conclusion: {'STOP' if tool == query.split()[0] else 'CONTINUE'}"
    return f"<answer>{latest}</answer>" if role == "answer" else ""


def application(marks: tuple[str, str]) -> web.Application:
    """Return a server whose ``POST /generate`` answers by ``ruled`` the prompt between the ``marks``, of the template
    before and after the user's text."""

    async def generate(request: web.Request) -> web.Response:
        text = (await request.json())["text"]
        return web.json_response({"text": ruled(text.partition(marks[0])[2].partition(marks[1])[0])})

    app = web.Application()
    app.router.add_post("/generate", generate)
    return app
