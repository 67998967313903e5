"""Correctness of an answer. Nothing of slime is imported, so that agents in processes of their own may use it."""

from __future__ import annotations

import re
import string
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized(text: str) -> str:
    """Return an answer as SQuAD's evaluation compares it: lower case, no punctuation, articles or extra blanks."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def targets(label: Any) -> list[str]:
    """Return the right answers of a label: a text, a list, or Search-R1's ``{"ground_truth": {"target": ...}}``."""
    while isinstance(label, dict):
        label = label["ground_truth"] if "ground_truth" in label else label["target"]
    return [label] if isinstance(label, str) else [str(one) for one in label]


def is_right(answer: str, label: Any) -> bool:
    """True when the normalized answer is one of the label's."""
    return normalized(answer) in [normalized(target) for target in targets(label)]
