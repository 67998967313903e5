"""Answer a question after searches: ``<search>``, ``<information>``, ``<answer>``."""

from __future__ import annotations

import re
from typing import Any

from examples.search_r1.answers import is_right
from slime.rollout.environments import Environment, Step
from slime.utils.http_utils import post

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
INVALID = (
    "\nThat was neither a search nor an answer. Write <search>words</search> to search, or <answer>text</answer> to "
    "answer.\n"
)


def shown(hits: list[dict[str, Any]]) -> str:
    """Return documents as the model sees them; the first line of their contents is the title, in quotes."""
    lines = []
    for number, hit in enumerate(hits, 1):
        title, _, text = hit.get("document", hit)["contents"].partition("\n")
        title = title.strip('"')
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines)


class Search(Environment):
    """``options``: ``url`` of the retrieval server and ``topk`` (3).

    The first ``<search>`` or ``<answer>`` of a turn counts. The reward is 1 when the answer is one of the label's. Let
    ``--rollout-stop`` end turns at ``</search>`` and ``</answer>``.
    """

    async def step(self, action: str) -> Step:
        found = _ACTION.search(action)
        if found is None:
            return Step(INVALID)
        kind, content = found[1], found[2].strip()
        if kind == "answer":
            return Step(reward=float(is_right(content, self.task.label)), done=True)
        payload = {"queries": [content], "topk": self.task.options.get("topk", 3), "return_scores": True}
        answer = await post(self.task.options["url"], payload)
        return Step(f"\n\n<information>{shown(answer['result'][0])}</information>\n\n", tool_calls=1)

    def format_observation(self, observation: str) -> str:
        return observation
