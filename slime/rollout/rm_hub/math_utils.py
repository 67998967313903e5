"""Grading of mathematical answers: take the last box, compare normalized text, then compare values with sympy.

The rules are those of the MATH data set's grader (Hendrycks et al. 2021) and of PRM800K's (Lightman et al. 2023):
fractions must be reduced, and an integer is only equal to an integer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import Any

from slime.rollout.rm_hub.answer_text import without_end_tokens
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

_OPENING, _CLOSING = "([", ")]"
_UNITS = (
    "degree", "centimeter", "cm", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year", "foot",
    "feet", "inch", "yard",
)  # fmt: skip
_UNIT = re.compile(r"(?<![a-zA-Z\\])(?:" + "|".join(_UNITS) + r")(?:es|s)?(?![a-zA-Z]) *(?:\^ *\{?[0-9]+\}?)?")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")
_INTEGER_FRACTION = re.compile(r"-?\d+/\d+")
_DECIMAL = re.compile(r"-?(?:\d+\.?\d*|\.\d+)")


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
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    text = text.replace("\\left", "").replace("\\right", "")
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "")
    text = text.partition("\\text{ ")[0] or text  # units on the right
    text = text.replace("\\%", "").replace("%", "")
    text = re.sub(r"(^|[ {])\.(?=\d)", r"\g<1>0.", text)
    left, equals, right = text.partition("=")
    if equals and len(left.strip()) <= 2 and "=" not in right:
        text = right
    text = re.sub(r"\\sqrt\s*([^\s{\[\\])", r"\\sqrt{\1}", text)
    text = text.replace(" ", "")
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


def _normalize(answer: str) -> str:
    """Return an answer as plain lower-case text that an expression parser can read."""
    text = answer.strip()
    whole = re.fullmatch(r"\\text\{([^{}]+)\}", text)
    if whole:
        text = whole[1]
    text = text.replace("\\%", "%").replace("\\$", "$").replace("$", "").replace("%", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(word, f"*10^{power}")
    text = re.sub(r"\^ *\{? *\\circ *\}?", "", text)
    text = re.sub(r",\\! *", "", text)
    text = re.sub(r"\\text\{ *([^{}]*)\}", r" \1", text)
    text = _UNIT.sub("", text).strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = latex_to_plain(text)
    text = re.sub(r"- +", "-", text)
    text = re.sub(r"(?<![\d.)])(-?)(\d+) +(\d+/\d+)(?!\d)", _mixed_number, text)
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()
    text = _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text) if not _is_tuple(text) else text
    number = _as_number(text)
    return str(number) if number is not None and number.denominator == 1 and "/" not in text else text


def _mixed_number(match: re.Match[str]) -> str:
    return f"{match[1]}({match[2]}+{match[3]})" if match[1] else f"{match[2]}+{match[3]}"


def _as_number(text: str) -> Fraction | None:
    """Return an integer, decimal or integer fraction exactly; None for anything else."""
    if len(text) > 400:
        return None
    if _INTEGER_FRACTION.fullmatch(text):
        numerator, _, denominator = text.partition("/")
        return Fraction(int(numerator), int(denominator)) if int(denominator) else None
    return Fraction(text) if _DECIMAL.fullmatch(text) else None


def _is_tuple(text: str) -> bool:
    """True when one pair of brackets surrounds all of ``text``."""
    return len(text) > 2 and text[0] in _OPENING and text[-1] in _CLOSING and 0 not in list(_depths(text))[:-1]


def _depths(text: str) -> Iterator[int]:
    """Yield how many brackets are open after each character."""
    depth = 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        yield depth


def _elements(text: str) -> list[str]:
    """Return the parts of a tuple, or ``text`` itself."""
    if not _is_tuple(text):
        return [text]
    commas = [i for i, depth in enumerate(_depths(text)) if depth == 1 and text[i] == ","]
    return [text[i + 1 : j].strip() for i, j in pairwise([0, *commas, len(text) - 1])]


def _equal_elements(given: str, truth: str) -> bool:
    if given == truth:
        return True
    if _INTEGER_FRACTION.fullmatch(given) and _INTEGER_FRACTION.fullmatch(truth):
        return False  # a fraction that is not reduced is not accepted
    given_number, truth_number = _as_number(given), _as_number(truth)
    if _is_integer(given_number) != _is_integer(truth_number):
        return False
    if given_number is not None and truth_number is not None:
        return given_number == truth_number
    if unknown_letters(given) > 2 or unknown_letters(truth) > 2:
        return False  # words, not formulas
    return equal_values(given, truth)


def _is_integer(number: Fraction | None) -> bool:
    return number is not None and number.denominator == 1


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """True when the two answers have the same value (tuples: element by element, with the same brackets)."""
    given, truth = _normalize(given_answer), _normalize(ground_truth)
    if given == truth:
        return True
    if not given or not truth:
        return False
    given_elements, truth_elements = _elements(given), _elements(truth)
    if len(given_elements) != len(truth_elements):
        return False
    if len(truth_elements) > 1 and (given[0] != truth[0] or given[-1] != truth[-1]):
        return False
    return all(map(_equal_elements, given_elements, truth_elements))


def ground_truth_answer(ground_truth: object) -> str | None:
    r"""Return a label's answer as text: the content of its own ``\boxed`` where it has one; None for no label."""
    text = "" if ground_truth is None else str(ground_truth)
    if not text.strip():
        return None
    return extract_answer(text) if "\\boxed" in text or "\\fbox" in text else text


def grade_answer_verl(solution_str: str, ground_truth: object) -> bool:
    """True when the last box of ``solution_str`` gives the answer ``ground_truth`` (whose own box is looked into)."""
    truth, given = ground_truth_answer(ground_truth), extract_answer(solution_str)
    if truth is None or given is None:
        return False
    return grade_answer_mathd(given, truth) or grade_answer_sympy(given, truth)


_FUNCTIONS = ("sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "log", "ln", "exp", "abs")
_CONSTANTS = ("pi", "infinity", "inf", "e", "i")
_NAMES = sorted((*_FUNCTIONS, *_CONSTANTS), key=len, reverse=True)
_TOKEN = re.compile(r"\d+\.?\d*|\.\d+|" + "|".join(_NAMES) + r"|[a-z]|\*\*|[-+*/^!(),]")
_MAX_LENGTH, _MAX_DEPTH, _MAX_BITS = 300, 40, 20_000
_WORDS = re.compile("|".join(_NAMES))

_LATEX_WORDS = {
    "\\cdot": "*", "\\times": "*", "\\div": "/", "\\pi": "pi", "\\infty": "infinity", "\\left": "", "\\right": "",
    "\\,": "", "\\;": "", "\\ ": " ", "\\!": "", "\\{": "(", "\\}": ")", "\\displaystyle": "", "\\%": "", "\\pm": "±",
}  # fmt: skip


class NotAnExpression(ValueError):
    """Text that is no expression this parser knows, or one too large to evaluate."""


def latex_to_plain(text: str) -> str:
    r"""Rewrite LaTeX (``\frac``, ``\sqrt``, ``\cdot``, functions, powers) as plain infix text."""
    if "√" in text:
        text = re.sub(r"√ *\(", "\\\\sqrt(", text)
        text = re.sub(r"√ *(\w+)", r"\\sqrt{\1}", text)
    text = text.replace("π", "\\pi ").replace("∞", "\\infty ").replace("·", "\\cdot ").replace("×", "\\times ")
    text = text.replace("−", "-").replace("÷", "\\div ")
    if "\\" not in text and "{" not in text:
        return text
    text = re.sub(r"\\[dtc]?frac\s*", r"\\frac", text)
    text = re.sub(r"\\frac(\d)(?=[\d{])", r"\\frac{\1}", text)
    text = re.sub(r"\\frac(\{[^{}]*\})(\d)", r"\\frac\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", text)
    for _ in range(_MAX_DEPTH):  # innermost braces first
        before = text
        text = re.sub(r"(?<![\w)])(\d+)?\\frac\{([^{}]*)\}\{([^{}]*)\}", _plain_fraction, text)
        text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
        text = re.sub(r"\\sqrt\[([^\[\]]*)\]\{([^{}]*)\}", r"((\2)^(1/(\1)))", text)
        text = re.sub(r"\\sqrt\{([^{}]*)\}", r" sqrt(\1)", text)  # the space ends a command before it
        text = re.sub(r"\^\{([^{}]*)\}", r"^(\1)", text)
        text = re.sub(r"\\(?:text|mathrm|mathbf|operatorname|mbox)\{([^{}]*)\}", r" \1 ", text)
        if text == before:
            break
    for word, plain in _LATEX_WORDS.items():
        text = re.sub(re.escape(word) + r"(?![a-zA-Z])" if word[-1].isalpha() else re.escape(word), plain, text)
    return re.sub(r"\\([a-zA-Z]+)", r"\1", text)


def _plain_fraction(match: re.Match[str]) -> str:
    whole, numerator, denominator = match[1], match[2], match[3]
    simple = re.fullmatch(r"\s*\d+\s*", numerator) and re.fullmatch(r"\s*\d+\s*", denominator)
    if whole:  # a mixed number: 3\frac{1}{2}
        return f"{whole} {numerator}/{denominator}" if simple else f"{whole}*(({numerator})/({denominator}))"
    return f"{numerator.strip()}/{denominator.strip()}" if simple else f"(({numerator})/({denominator}))"


def unknown_letters(text: str) -> int:
    """Return how many different letters of ``text`` belong to no known function or constant."""
    return len({letter for letter in _WORDS.sub("", text) if letter.isalpha()})


def equal_values(first: str, second: str) -> bool:
    """True when two expressions have the same value, for all values of their variables.

    Constants are compared to 30 digits, formulas at several points. False when either cannot be read.
    """
    import sympy

    try:
        difference = _Parser(first).parse() - _Parser(second).parse()
        if difference == 0:
            return True
        symbols = sorted(difference.free_symbols, key=str)
        rng = random.Random(0)
        zeros = 0
        for _ in range(1 if not symbols else 6):
            point = {s: sympy.Rational(rng.choice((-1, 1)) * rng.randint(3, 9973), 997) for s in symbols}
            value = difference.subs(point).evalf(30, maxn=200)
            if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo):
                continue
            if abs(value) > sympy.Float("1e-12"):
                return False
            zeros += 1
        return zeros > 0
    except (NotAnExpression, ZeroDivisionError, OverflowError, RecursionError, TypeError, ValueError, AttributeError):
        return False


class _Parser:
    """Recursive descent over ``+ - * / ^ !``, implicit products, functions and parentheses."""

    def __init__(self, text: str) -> None:
        if len(text) > _MAX_LENGTH:
            raise NotAnExpression(f"{len(text)} characters are too long for an answer")
        text = text.lower().replace(" ", "").replace("**", "^")
        self.tokens = _TOKEN.findall(text)
        if "".join(self.tokens) != text or not text:
            raise NotAnExpression(f"unreadable characters in {text!r}")
        self.position = 0
        self.depth = 0

    def parse(self) -> Any:
        value = self._sum()
        if self.position != len(self.tokens):
            raise NotAnExpression(f"unexpected {self.tokens[self.position]!r}")
        return value

    def _peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self.position += 1
        return token

    def _sum(self) -> Any:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise NotAnExpression("nested too deeply")
        value = self._product()
        while self._peek() in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        self.depth -= 1
        return value

    def _product(self) -> Any:
        value = self._signed()
        while (token := self._peek()) and token not in ("+", "-", ")", ","):
            if token == "/":
                self._take()
                value = value / self._signed()
            else:
                if token == "*":
                    self._take()
                value = value * self._signed()
        return value

    def _signed(self) -> Any:
        sign = 1
        while self._peek() in ("+", "-"):
            sign = -sign if self._take() == "-" else sign
        return sign * self._power()

    def _power(self) -> Any:
        base = self._factorial()
        if self._peek() != "^":
            return base
        self._take()
        return _bounded_power(base, self._signed())

    def _factorial(self) -> Any:
        import sympy

        value = self._atom()
        while self._peek() == "!":
            self._take()
            if value.is_number and not (value.is_Integer and 0 <= value <= 500):
                raise NotAnExpression(f"factorial of {value}")
            value = sympy.factorial(value)
        return value

    def _atom(self) -> Any:
        import sympy

        token = self._take()
        if token == "(":
            value = self._sum()
            if self._take() != ")":
                raise NotAnExpression("an unclosed parenthesis")
            return value
        if token and (token[0].isdigit() or token[0] == "."):
            return sympy.Rational(token.rstrip(".") if token != "." else "0")
        if token in _FUNCTIONS:
            return self._function(token)
        constants = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "inf": sympy.oo, "infinity": sympy.oo}
        if token in constants:
            return constants[token]
        if len(token) == 1 and token.isalpha():
            return sympy.Symbol(token)
        raise NotAnExpression(f"unexpected {token!r}")

    def _function(self, name: str) -> Any:
        import sympy

        exponent = None
        if self._peek() == "^":
            self._take()
            exponent = self._atom()
        if self._peek() == "(":
            argument = self._atom()
        else:
            argument = self._power()
        functions = {
            "ln": sympy.log, "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "abs": sympy.Abs,
        }  # fmt: skip
        value = functions.get(name, getattr(sympy, name, None))(argument)  # type: ignore[misc]
        return value if exponent is None else _bounded_power(value, exponent)


def _bounded_power(base: Any, exponent: Any) -> Any:
    if exponent.is_number and base.is_number:
        size = abs(exponent.evalf(15))
        if not size.is_real or size > 10_000:
            raise NotAnExpression(f"exponent {exponent} is too large")
        if base.is_Rational and max(base.p.bit_length(), base.q.bit_length()) * float(size) > _MAX_BITS:
            raise NotAnExpression(f"{base}^{exponent} is too large")
    return base**exponent
