"""Text that is meant to raise, hang or burn: every rule ends at once, and no answer is right by accident."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

import pytest

from slime.rollout.rm_hub import rules
from slime.rollout.rm_hub.math_utils import canonical, equal_answers

PIECES = [
    "1", "1 ", " ", "a",
    r"\frac{", "{", "}", "(", ")", "[", "]", r"\{", r"\}", "^", "_", "^{", "_{", "+", "-", "*", "/",
    "!", "|", ",", ", ", r"\text{", r"\textbf{ ", r"\color{red}", r"\color[",
    r"\sqrt", r"\sqrt[", r"\sin ", r"\sin^{-1}",
    "√", "√(", "=", "<", r"\le", r"\cup", "±", "x", r"\alpha", "e", "1e5", "0", "1,000,", "1 000 ",
    " or ", "million", "cm",
    "∘", "°", r"\begin{pmatrix}", r"\end{pmatrix}", "&", r"\\", "\\", "$", "%", "####", r"\boxed{", "½", "²", "₂", "．",
    "1/2 ", "1 1/2", "x!", r"\hspace{", r"\tag{", r"\left.", "∈", "x_1", r"\text{ ", "9^", "log_", r"\binom{", "pi",
    "infinity", "\ud800", "٣", "f(", "f^{-1}(", "'", '"', "\0", "<think>", "</think>", "Answer:", "A", "\n",
]  # fmt: skip
RESPONSES = {"math": r"\boxed{%s}", "deepscaler": r"</think>\boxed %s", "dapo": "Answer: %s", "gpqa": "%s", "f1": "%s"}
METADATA = {"choices": ["x < 5", "x > 5", "none"]}
LIMIT_S = 1.0


def grade_all(text: str, label: str) -> None:
    for kind, response in RESPONSES.items():
        began = time.process_time()
        rules.grade(kind, response % text, label, METADATA)
        assert time.process_time() - began < LIMIT_S, (kind, text[:80], label)


def mixtures(seed: int, count: int, longest: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        yield "".join(rng.choices(PIECES, k=rng.randint(1, longest)))


@pytest.mark.slow
@pytest.mark.parametrize("piece", PIECES, ids=ascii)
def test_long_repetitions(piece):
    for text in (piece * 5000, f"x{piece * 5000}y", f"({piece * 5000})"):
        grade_all(text, "42")


def test_mixtures():
    for text in mixtures(0, 300, 12):
        grade_all(text, "x+1")
        grade_all("x+1", text)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 41))
def test_many_mixtures(seed):
    for text in mixtures(seed, 1000, 30):
        grade_all(text, "x+1")


def test_equality_is_symmetric_and_holds_of_the_same():
    texts = [canonical(text) for text in mixtures(1, 400, 6)]
    for one, other in itertools.pairwise(texts):
        assert equal_answers(one, one)
        assert equal_answers(one, other) == equal_answers(other, one)
