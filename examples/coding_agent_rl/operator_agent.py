"""The agent of the small version: the model writes one character, which becomes the operator in ``calc.py``."""

from __future__ import annotations

from slime.agent.harness import ScriptedHarness


class OperatorHarness(ScriptedHarness):
    """Plays in the sandbox like every agent; the rest of an answer after its first character is not looked at."""

    max_turns = 1
    policy = """
import re

def act(reply, messages):
    operator = (reply.get("content") or "").strip()[:1]
    if operator and operator in "+-*%":
        with open("calc.py") as file:
            source = file.read()
        with open("calc.py", "w") as file:
            file.write(re.sub(r"a . b", "a %s b" % operator, source))
    return None
"""
