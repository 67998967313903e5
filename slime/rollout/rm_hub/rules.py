"""The built-in rewards that are rules, as one plain function: what worker processes compute."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from slime.algorithms.reward_types import REWARD_TYPES
from slime.rollout.rm_hub.answer_text import final_answer
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.labels import accepted_answers
from slime.rollout.rm_hub.math_dapo_utils import ANSWER_PATTERN, compute_score
from slime.rollout.rm_hub.math_utils import grade_answer_verl, ground_truth_answers
from slime.utils.misc import load_function

PATH = f"{__name__}.grade"
INSTALL = 'pip install "slime[math]"'


def grade(kind: str, response: str, label: object, metadata: Mapping[str, Any]) -> Any:
    """Return the reward of one response by the rule ``kind`` of the table ``slime.algorithms.reward_types``."""
    return load_function(REWARD_TYPES[kind].function)(response, label, metadata)


def as_response(kind: str, answer: str) -> str:
    """Return a response in which the rule ``kind`` finds just ``answer``, which was taken out of a box."""
    form = REWARD_TYPES[kind].answer
    if form == "box" and answer:
        return f"</think>\\boxed{{{answer}}}"
    if form == "line" and answer and not re.search(ANSWER_PATTERN, answer):
        return f"Answer: {' '.join(answer.split())}"
    return answer


def best_answers(kind: str, label: object, metadata: Mapping[str, Any]) -> list[str]:
    """Return responses of which one should be right; none where the rule does not define any."""
    entry = REWARD_TYPES[kind]
    if entry.best_answers is not None:
        return load_function(entry.best_answers)(label, metadata)
    if not entry.labels:
        return []
    texts = ground_truth_answers(label) if entry.answer == "box" else accepted_answers(label)
    return [as_response(kind, text) for text in texts]


def prepare(kind: str, *_: object) -> None:
    """Load what ``grade`` of these arguments loads once: no answer is charged for it."""
    entry = REWARD_TYPES[kind]
    load_function(entry.function)
    if entry.prepare is not None:
        load_function(entry.prepare)()


# Rules of the table whose public functions have another signature


def grade_math(response: str, label: object, metadata: Mapping[str, Any]) -> int:
    """Return 1 for the right answer in the last box."""
    return int(grade_answer_verl(response, label))


def grade_math_verify(response: str, label: object, metadata: Mapping[str, Any]) -> int:
    """Return 1 for an answer that the package math-verify finds and takes for right."""
    return compute_math_verify_reward(response, label)


def grade_deepscaler(response: str, label: object, metadata: Mapping[str, Any]) -> int:
    """Return 1 for the right answer in the last box after the reasoning."""
    return get_deepscaler_rule_based_reward(response, label)


def grade_dapo(response: str, label: object, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``score`` (1 or -1), ``acc`` and ``pred`` of the last line with an answer."""
    return compute_score(response, label)


def grade_f1(response: str, label: object, metadata: Mapping[str, Any]) -> float:
    """Return the F1 of the words."""
    return f1_score(response, label)[0]


# Grading by the package math-verify, which finds an answer without a box too. Its own time limits are signals and stay
# off: the worker process has limits. Nothing that a model wrote is executed.


@functools.cache
def load_math_verify() -> ModuleType:
    """Return the package. Raises ImportError that says how to install it."""
    try:
        import math_verify
    except ImportError as e:
        raise ImportError(f"--rm-type math_verify needs the package math-verify: {INSTALL} ({e})") from e
    for name in ("parser", "grader"):  # one warning per process that the limits are off, which they are meant to be
        logging.getLogger(f"math_verify.{name}").setLevel(logging.ERROR)
    math_verify.parse("\\boxed{1}", parsing_timeout=None)  # the first call compiles its patterns, which takes seconds
    return math_verify


def compute_math_verify_reward(response: str, label: object) -> int:
    """Return 1 when math-verify finds an answer after the reasoning that equals one that the label accepts, else 0."""
    math_verify = load_math_verify()
    given = math_verify.parse(final_answer(response), parsing_timeout=None)
    return int(any(_equal(truth, given) for truth in ground_truth_answers(label)))


def _equal(truth: str, given: list[object]) -> bool:
    math_verify = load_math_verify()
    expected = math_verify.parse(f"\\boxed{{{truth}}}", parsing_timeout=None)
    return bool(math_verify.verify(expected, given, timeout_seconds=None))
