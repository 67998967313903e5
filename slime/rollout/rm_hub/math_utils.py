"""Grading of mathematical answers: take the last box, compare normalized text, then compare its value.

The rules are those of the MATH data set's grader (Hendrycks et al. 2021) and of PRM800K's (Lightman et al. 2023):
fractions must be reduced, and an integer is only equal to an integer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

from slime.rollout.rm_hub.answer_text import without_end_tokens
from slime.rollout.rm_hub.bare_latex import bare_latex
from slime.rollout.rm_hub.expressions import FUNCTIONS, NAMES, NotAnExpression, Tree, parse
from slime.rollout.rm_hub.labels import accepted_answers
from slime.rollout.rm_hub.values import equal_values
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

_UNITS = (
    "degree", "centimeter", "cm", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year", "foot",
    "feet", "inch", "yard",
)  # fmt: skip
_UNIT = re.compile(r"(?<![a-zA-Z\\])(?:" + "|".join(_UNITS) + r")(?:es|s)?(?![a-zA-Z]) *(?:\^ *\{?[0-9]+\}?)?")
_E_NOTATION = re.compile(r"(?<![\w.])(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d{1,3}(?![\w.^!({])")
_GROUPED_BY_LATEX = re.compile(r"(?<=\d)(?:,\\!|\{,\}) *(?=\d{3}(?!\d))")
_GROUPED_BY_SPACES = re.compile(r"(?<![\d.,])\d{1,3}(?: +\d{3})+(?!\d)")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")
_ENTRIES = re.compile(r"(?<![\d.])[1-9]\d*(?:,\d{3})*,0\d\d(?:,\d{3})*(?!\d)")
_MIXED = re.compile(r"(?<![\d.)\w}])(\d+) +(\d+)/(\d+)(?![\d!^])")
_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
}  # fmt: skip
_OPENING, _CLOSING = "([{⦃⟨", ")]}⦄⟩"
_FLIPPED = str.maketrans("<>≤≥", "><≥≤")
_MATRIX = re.compile(r"\\begin\{([pb]?)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
_PLAIN_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_LONGEST_KEPT = 1000
_MOST_NESTED, _MOST_UNORDERED = 6, 12
_NOT_LETTERS = re.compile(r"\\[a-z]+|_\{[^{}]*\}|" + "|".join(NAMES))


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


# Equality of two final answers: numbers, formulas, relations, tuples, intervals, sets, unions, matrices. Beyond
# mathematics, two rules of PRM800K's grader hold: a fraction of integers has to be reduced, and an integer is equal to
# a written one alone. The order of a list or tuple counts, that of a set or union does not; a \pm b is a set of two.


def canonical(answer: str) -> str:
    """Return an answer in lower case without units, markup and spaces, as ``equal_answers`` reads it."""
    if _PLAIN_NUMBER.fullmatch(answer):
        return answer
    return _canonical(answer) if len(answer) < _LONGEST_KEPT else _canonical.__wrapped__(answer)


@functools.lru_cache(maxsize=256)  # the label of a group is asked for with each of its answers
def _canonical(answer: str) -> str:
    text = bare_latex(_GROUPED_BY_LATEX.sub("", re.sub(r"\s+", " ", answer.strip())))
    text = text.replace("$", "").replace("%", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(word, f"*10^{power}")
    text = re.sub(r"\^ *\{? *∘ *\}?|°", "", text)
    text = _UNIT.sub("", text).strip()
    text = _E_NOTATION.sub(lambda m: format(Decimal(m[0].rstrip(".")), "f"), text)
    text = join_digits(re.sub(r"([_^])(\d+) +", r"\1{\2}", text))
    text = re.sub(r"(?<![a-zA-Z])a(sin|cos|tan)(?![a-zA-Z])", r"arc\1", text)
    text = re.sub(r"\\(" + "|".join(FUNCTIONS[1:]) + r")(?![a-zA-Z])", r"\1 ", text)  # \sqrt stays a command
    text = re.sub(r"\\([a-zA-Z]+) +([a-zA-Z0-9])(?![a-zA-Z0-9])", r"\\\1{\2}", text)
    text = re.sub(r"\s+", "", _lower(text))
    text = _without_thousands(text).replace("⦃⦄", "∅")
    text = re.sub(r"^\((\w+)\)_", r"\1_", text)  # a base is often written after parentheses
    return _scripts(text)


def join_digits(text: str) -> str:
    """Return ``text`` with mixed numbers as LaTeX and without the spaces that group digits; others between digits stay
    visible: ``2 3`` is not 23."""
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _GROUPED_BY_SPACES.sub(lambda m: m[0].replace(" ", ""), text)
    return re.sub(r"(?<=\d) +(?=\d)", "␣", text)


def _lower(text: str) -> str:
    """Lower case, except of Greek letters: Δ is no δ."""
    return re.sub("[^Α-Ω]+", lambda m: m[0].lower(), text)


def _without_thousands(text: str) -> str:
    """In a tuple a comma separates, unless what follows it could be no entry: ``(1,000)`` is not (1, 0)."""
    in_tuple = text[:1] in "([⦃⟨" and text[-1:] in ")]⦄⟩"
    return (_ENTRIES if in_tuple else _THOUSANDS).sub(lambda m: m[0].replace(",", ""), text)


def _scripts(text: str) -> str:
    """Braces around every script, and none around what needs none."""
    text = re.sub(r"_(\d|[a-z])(?![a-z0-9]*_)", r"_{\1}", text)
    text = re.sub(r"\^(\d+|[a-z])", r"^{\1}", text)
    text = re.sub(r"_\{([a-z]+)\}", lambda m: f"_{{{_BASES.get(m[1], m[1])}}}", text)
    for _ in range(_MOST_NESTED):
        text, found = re.subn(r"(^|[(\[{,=<>≤≥+*/⦃-])\{([^{}]*)\}", r"\1\2", text)
        if not found:
            break
    text = re.sub(r"(^|[(\[{,=<>≤≥⦃∪])\+", r"\1", text)
    return "∞" if text in ("infinity", "inf") else re.sub(r"(?<![a-z])(?:infinity|inf)(?![a-z])", "∞", text)


def equal_answers(given: str, truth: str, nested: int = 0) -> bool:
    """True when two canonical answers are equal."""
    if given == truth:
        return True
    if not given or not truth or nested > _MOST_NESTED:
        return False

    def same(one: str, other: str) -> bool:
        return equal_answers(one, other, nested + 1)

    given, truth = _without_membership(given), _without_membership(truth)
    unions = _split(given, "∪"), _split(truth, "∪")
    if max(map(len, unions)) > 1:
        return _same_in_any_order(*unions, same)
    kinds, parts = zip(_sequence(given), _sequence(truth), strict=True)
    if parts != ([given], [truth]):
        if "set" in kinds:
            return set(kinds) <= {"set", ""} and _same_in_any_order(*parts, same)
        alone = len(parts[0]) == len(parts[1]) == 1
        return (alone or kinds[0] == kinds[1]) and _all_same(*parts, same)
    matrices = _MATRIX.fullmatch(given), _MATRIX.fullmatch(truth)
    if matrices[0] and matrices[1]:
        return _same_matrices(matrices[0][2], matrices[1][2], same)
    relations = _relation(given), _relation(truth)
    if any(len(sides) > 1 for sides, _ in relations):
        return _same_relations(relations, same)
    return _same_single(given, truth)


def _split(text: str, separator: str) -> list[str]:
    """Split at a character where no bracket is open."""
    if separator not in text:
        return [text]
    places = [place for place, depth in enumerate(_depths(text)) if depth == 0 and text[place] == separator]
    return [text[i + 1 : j] for i, j in pairwise([-1, *places, len(text)])]


def _depths(text: str) -> Iterator[int]:
    """Yield how many brackets are open after each character."""
    depth = 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        yield depth


def _without_membership(text: str) -> str:
    """``x∈[1,2]`` is the interval, as ``x=5`` is 5."""
    return re.sub(r"^[a-z]∈(?=.)", "", text)


def _sequence(text: str) -> tuple[str, list[str]]:
    """Return the kind and the entries of a tuple, interval or set; anything else is a bare list, of one maybe ("")."""
    bare = _split(text, ",")
    if len(bare) > 1:
        return "", bare
    if text.count("±") == 1:
        return "set", [text.replace("±", "+").removeprefix("+"), text.replace("±", "-")]
    around = text[:1], text[-1:]
    if len(text) > 2 and around[0] in "([⦃⟨" and around[1] in ")]⦄⟩" and 0 not in list(_depths(text))[:-1]:
        inner = _split(text[1:-1], ",")
        if around == ("⦃", "⦄"):
            return "set", inner
        return "".join(around) if len(inner) > 1 else "", inner
    return "", [text]


def _all_same(given: Sequence[str], truth: Sequence[str], same: Callable[[str, str], bool]) -> bool:
    return len(given) == len(truth) and all(map(same, given, truth))


def _same_in_any_order(given: Sequence[str], truth: Sequence[str], same: Callable[[str, str], bool]) -> bool:
    left, right = set(given) - set(truth), set(truth) - set(given)
    if len(left) > _MOST_UNORDERED or len(right) > _MOST_UNORDERED:
        return False
    return all(any(same(a, b) for b in truth) for a in left) and all(any(same(a, b) for a in given) for b in right)


def _same_matrices(given: str, truth: str, same: Callable[[str, str], bool]) -> bool:
    rows = [[row.split("&") for row in text.strip("\\").split("\\\\")] for text in (given, truth)]
    return len(rows[0]) == len(rows[1]) and all(_all_same(a, b, same) for a, b in zip(*rows, strict=True))


def _relation(text: str) -> tuple[list[str], str]:
    """Return the sides of a relation and its signs."""
    places = [place for place, depth in enumerate(_depths(text)) if depth == 0 and text[place] in "<>≤≥=≠≡≈→⇒⇔∈"]
    sides = [text[i + 1 : j] for i, j in pairwise([-1, *places, len(text)])]
    return sides, "".join(text[place] for place in places)


def _same_relations(
    relations: tuple[tuple[list[str], str], tuple[list[str], str]], same: Callable[[str, str], bool]
) -> bool:
    (given, given_signs), (truth, truth_signs) = relations
    if len(given) == len(truth):
        turned = given_signs[::-1].translate(_FLIPPED)
        return (given_signs == truth_signs and _all_same(given, truth, same)) or (
            turned == truth_signs and not set(turned) & set("→⇒∈") and _all_same(given[::-1], truth, same)
        )
    short, long = sorted((given, truth), key=len)
    signs = given_signs or truth_signs
    named = len(short) == 1 and len(long) == 2 and signs == "=" and _is_name(long[0])
    return named and same(given[-1], truth[-1])


def _is_name(text: str) -> bool:
    r"""Return True if ``text`` may name an answer: ``x``, ``x_{1}``, ``f(x)``, ``ab`` (a side of a triangle)."""
    return re.fullmatch(r"[^\W\d_]{1,2}(?:_\{[^{}]*\})?'?(?:\([a-z]\))?", text) is not None


def _same_single(given: str, truth: str) -> bool:
    try:
        trees = parse(given), parse(truth)
    except (NotAnExpression, RecursionError):
        return False
    fractions = [_integer_fraction(tree) for tree in trees]
    if None not in fractions:
        return fractions[0] == fractions[1]  # one that is not reduced is not accepted
    numbers = [_number(tree) for tree in trees]
    if _is_integer(numbers[0]) != _is_integer(numbers[1]):
        return False
    if None not in numbers:
        return numbers[0] == numbers[1]
    return _is_formula(given) and _is_formula(truth) and equal_values(*trees)


def _number(tree: Tree) -> Fraction | None:
    """The value of a written number, None of anything else."""
    if tree[0] == "negative":
        number = _number(tree[1])
        return None if number is None else -number
    return tree[1] if tree[0] == "number" else None


def _is_integer(number: Fraction | None) -> bool:
    return number is not None and number.denominator == 1


def _integer_fraction(tree: Tree) -> tuple[Fraction, Fraction] | None:
    """Numerator, with the sign, and denominator of a fraction of two written integers."""
    if tree[0] == "negative":
        positive = _integer_fraction(tree[1])
        return None if positive is None else (-positive[0], positive[1])
    if tree[0] != "/":
        return None
    above, below = _number(tree[1]), _number(tree[2])
    if above is None or below is None or not _is_integer(above) or not _is_integer(below):
        return None
    return (above, below) if below > 0 else (-above, -below)


def _is_formula(text: str) -> bool:
    """Return True if the letters of ``text`` may be symbols: those of words are not, whose order counts."""
    plain = _NOT_LETTERS.sub(" ", text)
    runs = re.findall(r"[a-z]+", plain)
    different, longest = len(set("".join(runs))), max(map(len, runs), default=0)
    if longest > 2 and re.search(r"[-+*/^(]", text) is None:
        return False
    return different <= 2 or (different <= 8 and longest <= 3)
