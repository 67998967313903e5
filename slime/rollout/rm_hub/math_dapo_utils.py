"""The rule reward of DAPO: the last ``Answer:`` line, normalized as in Minerva (Lewkowycz et al. 2022, appendix D)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from slime.rollout.rm_hub.answer_text import without_end_tokens
from slime.rollout.rm_hub.labels import accepted_answers
from slime.rollout.rm_hub.math_utils import last_boxed_only_string
from slime.rollout.rm_hub.math_utils import remove_boxed as _remove_boxed

__all__ = [
    "compute_score",
    "is_correct_minerva",
    "is_correct_strict_box",
    "last_boxed_only_string",
    "normalize_final_answer",
    "remove_boxed",
    "verify",
]

TAIL_CHARACTERS = 300
STRICT_BOX_CHARACTERS = 100
ANSWER_PATTERN = r"(?i)Answer\s*:\s*([^\n]+)"
_MOST_DIGITS = 4000
_E_NOTATION = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?[eE][+-]?[0-9]{1,3}")

_SUBSTITUTIONS = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots",
)  # fmt: skip


def remove_boxed(s: str) -> str:
    r"""Return what is inside ``\boxed{...}``. Raises AssertionError for anything else."""
    inner = _remove_boxed(s) if s.startswith("\\boxed{") else None
    assert inner is not None, f"not a closed box: {s!r}"
    return inner


def normalize_final_answer(final_answer: str) -> str:
    """Return the canonical text of an answer: no units, no LaTeX markup, no thousands separators, no end tokens."""
    text = without_end_tokens(final_answer).split("=")[-1]
    for before, after in _SUBSTITUTIONS:
        text = text.replace(before, after)
    for expression in _REMOVED:
        text = text.replace(expression, "")
    text = re.sub(r"^[^$]*\$([^$]*)\$.*$", r"$\1$", text, flags=re.DOTALL)
    text = re.sub(r"\\(?:text|textbf|overline)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text, flags=re.DOTALL)
    text = re.sub(r"(frac)([^{])(.)", r"frac{\2}{\3}", text)
    text = re.sub(r"(sqrt)([^{\[])", r"sqrt{\2}", text)
    text = text.replace("$", "")
    if text.replace(",", "").isdigit():
        text = text.replace(",", "")
    return text.strip()


def _label_texts(ground_truth: object) -> Iterator[str]:
    """Yield the normalized texts that a label accepts: as it is written, and a whole number as an integer too."""
    for text in accepted_answers(ground_truth):
        yield normalize_final_answer(text)
        plain = text.strip()
        if re.fullmatch(r"[+-]?[0-9]+(?:\.0*)?", plain) and len(plain) <= _MOST_DIGITS:
            yield str(int(plain.partition(".")[0]))
        elif _E_NOTATION.fullmatch(plain):
            yield format(Decimal(plain).normalize(), "f")


def is_correct_minerva(
    solution_str: str, gt: object, gt_need_extract: bool = False, answer_pattern: str = ANSWER_PATTERN
) -> tuple[bool, str]:
    """Return whether the last ``Answer: ...`` equals ``gt``, and the normalized answer (``[INVALID]`` without one)."""
    found = re.findall(answer_pattern, without_end_tokens(solution_str))
    prediction = normalize_final_answer(found[-1] if found else "[INVALID]")
    if gt_need_extract:
        box = last_boxed_only_string(str(gt))
        gt = remove_boxed(box) if box is not None else gt
    return prediction in _label_texts(gt), prediction


def is_correct_strict_box(pred: str, gt: object, pause_tokens_index: list[int] | None = None) -> tuple[int, str | None]:
    """Return 1 or -1, and the content of the last box in the tail of ``pred`` (None without one)."""
    start = pause_tokens_index[-1] - STRICT_BOX_CHARACTERS if pause_tokens_index else -STRICT_BOX_CHARACTERS
    tail = pred[max(start, 0) :] if pause_tokens_index else pred[start:]
    box = last_boxed_only_string(tail)
    content = _remove_boxed(box)
    return (1 if content is not None and content in (str(gt), *accepted_answers(gt)) else -1), content


def verify(
    solution_str: str, answer: object, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> tuple[bool, str | None]:
    """Return whether a solution is correct, and the answer found in it."""
    if strict_box_verify:
        score, content = is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return score == 1, content
    return is_correct_minerva(solution_str, answer)


def compute_score(
    solution_str: str,
    ground_truth: object,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """Return ``{"score": 1.0 or -1.0, "acc": bool, "pred": str}`` for the last 300 characters of a solution."""
    correct, prediction = verify(solution_str[-TAIL_CHARACTERS:], ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": prediction}
