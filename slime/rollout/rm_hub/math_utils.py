"""Grading of mathematical answers: take the last box, compare normalized text, then compare its value.

The rules are those of the MATH data set's grader (Hendrycks et al. 2021) and of PRM800K's (Lightman et al. 2023):
fractions must be reduced, and an integer is only equal to an integer.
"""

from __future__ import annotations

import re

from slime.rollout.rm_hub.answer_text import without_end_tokens
from slime.rollout.rm_hub.equal_answers import canonical, equal_answers, join_digits
from slime.rollout.rm_hub.labels import accepted_answers
from slime.utils.moved import also_named

__all__ = [
    "extract_answer",
    "extract_boxed_answer",
    "grade_answer_mathd",
    "grade_answer_sympy",
    "grade_answer_verl",
    "last_boxed_only_string",
    "mathd_normalize_answer",
    "remove_boxed",
]


@also_named(s="string")
def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last ``\boxed{...}`` (or, without one, ``\fbox{...}``) of ``string``; None when it is not closed.

    ``\boxed 5`` without braces ends at the next space or ``$``, or where the tokens begin that end a response.
    """
    string = without_end_tokens(string)
    start = max(string.rfind("\\boxed"), -1)
    command = "\\boxed"
    if start < 0:
        start, command = string.rfind("\\fbox"), "\\fbox"
    if start < 0:
        return None
    position = start + len(command)
    while position < len(string) and string[position] == " ":
        position += 1
    if position >= len(string):
        return None
    if string[position] != "{":
        end = re.search(r"[\s$]", string[position:])
        return string[start : position + end.start()] if end else string[start:]
    depth = 0
    for i in range(position, len(string)):
        depth += {"{": 1, "}": -1}.get(string[i], 0)
        if depth == 0:
            return string[start : i + 1]
    return None


def remove_boxed(s: str | None) -> str | None:
    r"""Return what is inside ``\boxed{...}``, ``\fbox{...}`` or after ``\boxed``; None for anything else."""
    if s is None:
        return None
    match = re.fullmatch(r"\\(?:boxed|fbox) *(?:\{(.*)\}|([^\s{].*))", s, re.DOTALL)
    if match is None:
        return None
    return match[1] if match[1] is not None else match[2]


def extract_boxed_answer(solution: str) -> str | None:
    """Return the content of the last box of ``solution``, or None."""
    return remove_boxed(last_boxed_only_string(solution))


def extract_answer(passage: str) -> str | None:
    """Return the answer a solution gives: the content of its last box, or None."""
    return extract_boxed_answer(passage)


def mathd_normalize_answer(answer: str | None) -> str | None:
    r"""Return the canonical text of a LaTeX answer, e.g. ``\dfrac12`` and ``1/2`` both as ``\frac{1}{2}``."""
    if answer is None:
        return None
    text = answer.strip()
    whole = re.fullmatch(r"\\text\{(.+)\}", text)
    if whole and "}" not in whole[1]:
        text = whole[1].strip()
    text = re.sub(r"\s+", " ", text.replace("\n", "")).replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", text)
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "")
    text = re.sub(r"(?<=\S)\s*\\text\{ [^{}]*\}(?:\^\{?\d\}?)?$", "", text)  # units on the right
    text = text.replace("\\%", "").replace("%", "")
    text = re.sub(r"(^|[ {])\.(?=\d)", r"\g<1>0.", text)
    left, equals, right = text.partition("=")
    if equals and re.fullmatch(r"\s*\w?\w?\s*", left) and "=" not in right:
        text = right
    text = re.sub(r"\\sqrt\s*([^\s{\[\\])", r"\\sqrt{\1}", text)
    text = join_digits(text.strip()).replace(" ", "")
    text = re.sub(r"\\frac(?:(\d)|\{([^{}]*)\})(?:(\d)|\{([^{}]*)\})", _braced_fraction, text)
    if text == "0.5":
        return "\\frac{1}{2}"
    match = re.fullmatch(r"(-?\d+)/(-?\d+)", text)
    return f"\\frac{{{match[1]}}}{{{match[2]}}}" if match else text


def _braced_fraction(match: re.Match[str]) -> str:
    numerator = match[1] if match[1] is not None else match[2]
    denominator = match[3] if match[3] is not None else match[4]
    return f"\\frac{{{numerator}}}{{{denominator}}}"


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """True when the canonical texts of the two answers are the same."""
    return mathd_normalize_answer(given_answer) == mathd_normalize_answer(ground_truth)


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """True when the two answers are equal, values compared (the name is older than the way it is done)."""
    return equal_answers(canonical(given_answer), canonical(ground_truth))


def ground_truth_answers(ground_truth: object) -> list[str]:
    r"""Return the answers a label accepts, as text: of each the content of its own ``\boxed`` where it has one."""
    found = (
        extract_answer(text) if "\\boxed" in text or "\\fbox" in text else text
        for text in accepted_answers(ground_truth)
    )
    return [text for text in found if text is not None]


def equals_label(given: str | None, ground_truth: object) -> bool:
    """True when an answer is one of those that a label accepts."""
    return given is not None and any(
        grade_answer_mathd(given, truth) or grade_answer_sympy(given, truth)
        for truth in ground_truth_answers(ground_truth)
    )


def grade_answer_verl(solution_str: str, ground_truth: object) -> bool:
    """True when the last box of ``solution_str`` gives the answer ``ground_truth``: a text, a number, or any other
    form that ``slime.rollout.rm_hub.labels`` knows."""
    return equals_label(extract_answer(solution_str), ground_truth)
