"""Grading by the package math-verify (``--rm-type math_verify``): it finds an answer without a box too.

Its own time limits are signals and stay off: the worker process has limits. Nothing that a model wrote is executed.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType

from slime.rollout.rm_hub.answer_text import final_answer
from slime.rollout.rm_hub.math_utils import ground_truth_answers

__all__ = ["compute_math_verify_reward", "load_math_verify"]

INSTALL = 'pip install "slime[math]"'


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
