"""Token F1 of short answers, as in SQuAD and HotpotQA."""

from __future__ import annotations

import re
import string
from collections import Counter

from slime.rollout.rm_hub.answer_text import final_answer
from slime.rollout.rm_hub.labels import accepted_answers

__all__ = ["f1_score", "normalize_answer"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = ("yes", "no", "noanswer")
_NOTHING = (0.0, 0.0, 0.0)


def normalize_answer(s: str) -> str:
    """Return ``s`` in lower case without punctuation and articles, words separated by single spaces."""
    return " ".join(_ARTICLES.sub(" ", s.lower().translate(_PUNCTUATION)).split())


def f1_score(prediction: str | None, ground_truth: object) -> tuple[float, float, float]:
    """Return ``(f1, precision, recall)`` over words, those of the best of several accepted answers (SQuAD's rule).

    All are 0 when a yes/no/noanswer is not met exactly. Reasoning before ``</think>`` and the tokens that end a
    response are no words of the prediction. ``ground_truth`` is any form that ``slime.rollout.rm_hub.labels`` knows.
    """
    if prediction is None:
        return _NOTHING
    given = normalize_answer(final_answer(prediction))
    return max((_score(given, normalize_answer(truth)) for truth in accepted_answers(ground_truth)), default=_NOTHING)


def _score(given: str, truth: str) -> tuple[float, float, float]:
    if given != truth and (given in _CLOSED_ANSWERS or truth in _CLOSED_ANSWERS):
        return _NOTHING
    given_words, truth_words = given.split(), truth.split()
    common = sum((Counter(given_words) & Counter(truth_words)).values())
    if common == 0:
        return _NOTHING
    precision, recall = common / len(given_words), common / len(truth_words)
    return 2 * precision * recall / (precision + recall), precision, recall
