"""Token F1 of short answers, as in SQuAD and HotpotQA."""

from __future__ import annotations

import re
import string
from collections import Counter

from slime.rollout.rm_hub.answer_text import final_answer

__all__ = ["f1_score", "normalize_answer"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = ("yes", "no", "noanswer")


def normalize_answer(s: str) -> str:
    """Return ``s`` in lower case without punctuation and articles, words separated by single spaces."""
    return " ".join(_ARTICLES.sub(" ", s.lower().translate(_PUNCTUATION)).split())


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """Return ``(f1, precision, recall)`` over words; all 0 when a yes/no/noanswer is not met exactly.

    Reasoning before ``</think>`` and the tokens that end a response are no words of the prediction.
    """
    nothing = (0.0, 0.0, 0.0)
    if prediction is None:
        return nothing
    given, truth = normalize_answer(final_answer(prediction)), normalize_answer(str(ground_truth))
    if given != truth and (given in _CLOSED_ANSWERS or truth in _CLOSED_ANSWERS):
        return nothing
    given_words, truth_words = given.split(), truth.split()
    common = sum((Counter(given_words) & Counter(truth_words)).values())
    if common == 0:
        return nothing
    precision, recall = common / len(given_words), common / len(truth_words)
    return 2 * precision * recall / (precision + recall), precision, recall
