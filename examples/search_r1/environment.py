"""Answer a question after searches: ``<search>``, ``<information>``, ``<answer>``."""

from __future__ import annotations

import re
import string
from typing import Any

from slime.rollout.environments import Environment, Step
from slime.utils.http_utils import post

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
INVALID = (
    "\nThat was neither a search nor an answer. Write <search>words</search> to search, or <answer>text</answer> to "
    "answer.\n"
)


def normalized(text: str) -> str:
    """Return an answer as SQuAD's evaluation compares it: lower case, no punctuation, articles or extra blanks."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def targets(label: Any) -> list[str]:
    """Return the right answers of a label: a text, a list, or Search-R1's ``{"ground_truth": {"target": ...}}``."""
    while isinstance(label, dict):
        label = label["ground_truth"] if "ground_truth" in label else label["target"]
    return [label] if isinstance(label, str) else [str(one) for one in label]


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
            right = [normalized(target) for target in targets(self.task.label)]
            return Step(reward=float(normalized(content) in right), done=True)
        payload = {"queries": [content], "topk": self.task.options.get("topk", 3), "return_scores": True}
        answer = await post(self.task.options["url"], payload)
        return Step(f"\n\n<information>{shown(answer['result'][0])}</information>\n\n", tool_calls=1)

    def format_observation(self, observation: str) -> str:
        return observation
