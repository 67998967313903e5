"""The agent of the small version: the model writes ``?`` to read the test, or the operator that ``calc.py`` gets."""

from __future__ import annotations

from slime.agent.harness import ScriptedHarness


class OperatorHarness(ScriptedHarness):
    """Plays in the sandbox like every agent; the rest of an answer after its first character is not looked at."""

    max_turns = 2
    policy = """
import re

def act(reply, messages):
    said = (reply.get("content") or "").strip()[:1]
    if said == "?":
        with open("check.py") as file:
            return "".join(re.search(r"(\\d+) (.) (\\d+)", file.read()).groups())
    if said and said in "+-*%":
        with open("calc.py") as file:
            source = file.read()
        with open("calc.py", "w") as file:
            file.write(re.sub(r"a . b", "a %s b" % said, source))
    return None
"""
