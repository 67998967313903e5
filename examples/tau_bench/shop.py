"""A shop of lamps, small enough for a tiny model: one order, a customer who wants another color, four rules.

The policy, which is not in the prompt and is learned from rewards: look an order up before anything else; then

=======  ==========================================================
status   what to do
=======  ==========================================================
new      ``set ORDER COLOR``, in the color that the customer wants
lost     ``refund ORDER``
sent     say ``no``
held     say ``call``: somebody will
=======  ==========================================================

A customer who has not said the color is asked ``color?``.
"""

from __future__ import annotations

import copy
import string
from argparse import Namespace
from typing import Any

from examples.tau_bench.environment import Opening, result
from slime.rollout.environments import Step, Task, ToolCall, ToolError

COLORS = ("red", "blue", "teal", "pink", "gray", "gold", "lime", "navy")
STATUSES = ("new", "lost", "sent", "held")
ORDERS = [letter + digit for letter in string.ascii_lowercase for digit in string.digits]
_TOOLS = {"get": 1, "set": 2, "refund": 1}
_LAST_WORDS = ("no", "call")


def right_turn(status: str, order: str, color: str) -> str:
    """Return the last turn that the policy asks for."""
    return {"new": f"set {order} {color}", "lost": f"refund {order}", "sent": "no", "held": "call"}[status]


class Shop:
    """Of the task's metadata: ``order``, its ``status``, the ``color`` that the customer wants, and ``tells``, whether
    the customer says so at once.

    The customer hangs up when the order was changed, or on an answer of ``no`` or ``call``. The reward is 1 when the
    data are then as the policy demands, and the answer is the one that it demands; else 0.
    """

    def __init__(self, args: Namespace, task: Task) -> None:
        about = task.metadata
        self.order, self.color, self.tells = about["order"], about["color"], about["tells"]
        self.orders: dict[str, dict[str, str]] = {self.order: {"status": about["status"], "color": "white"}}
        self.goal, self.last_words = copy.deepcopy(self.orders), ""
        name, *arguments = right_turn(about["status"], self.order, self.color).split()
        if arguments:
            self._change(self.goal, ToolCall(name, {"words": arguments}))
        else:
            self.last_words = name

    def open(self) -> Opening:
        """Begin with the order, and the color when the customer ``tells`` it."""
        return Opening("", (), f"{self.order} {self.color}" if self.tells else self.order)

    def parse(self, action: str) -> list[ToolCall | ToolError]:
        """Return the command of a turn: a tool and its arguments, as words."""
        name, *words = action.split() or [""]
        if name not in _TOOLS:
            return []
        if len(words) != _TOOLS[name]:
            return [ToolError(f"{name} takes {_TOOLS[name]}")]
        return [ToolCall(name, {"words": words})]

    def call(self, call: ToolCall) -> Step:
        """Look the order up, or change it, which ends the task."""
        order = call.arguments["words"][0]
        if order not in self.orders:
            return result("none", failed=True)
        if call.name == "get":
            return result(self.orders[order]["status"])
        self._change(self.orders, call)
        return result("ok", reward=self._reward(""), done=True)

    def say(self, text: str) -> Step:
        """Tell the color to the agent that asks for it; hang up at the last words; else be puzzled."""
        if text in _LAST_WORDS:
            return Step({"role": "user", "content": "bye"}, self._reward(text), done=True)
        return Step({"role": "user", "content": self.color if text == "color?" else "?"})

    def close(self) -> None:
        """There is nothing to release."""

    def _change(self, orders: dict[str, dict[str, Any]], call: ToolCall) -> None:
        order, *words = call.arguments["words"]
        orders[order] |= {"color": words[0]} if call.name == "set" else {"status": "refunded"}

    def _reward(self, last_words: str) -> float:
        return float(self.orders == self.goal and last_words == self.last_words)
