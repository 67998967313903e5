"""Values of mathematical expressions: a small, safe parser (no ``eval``) that builds sympy objects."""

from __future__ import annotations

import random
import re
from typing import Any

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
