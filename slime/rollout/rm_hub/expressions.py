r"""Reading expressions, LaTeX or plain, as trees: two answers are compared on these, and nothing is executed.

A tree is a tuple of an operator and its operands: ``("+", ...)``, ``("number", Fraction)``, ``("symbol", "x")``.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any

from slime.rollout.rm_hub.bare_latex import GREEK

__all__ = ["FUNCTIONS", "NAMES", "NotAnExpression", "Tree", "parse"]

Tree = tuple[Any, ...]

INVERTIBLE = {
    "sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot", "sec": "arcsec", "csc": "arccsc",
    "sinh": "arcsinh", "cosh": "arccosh", "tanh": "arctanh",
}  # fmt: skip
FUNCTIONS = ("sqrt", *INVERTIBLE, *INVERTIBLE.values(), "log", "ln", "exp", "abs")
NAMES = sorted((*FUNCTIONS, "pi"), key=len, reverse=True)
_SCRIPT = r"(?:_\{[^{}]*\})?"
_TOKEN = re.compile(
    r"\d+(?:\.\d*)?|\.\d+|\\(?:frac|sqrt|binom)(?![a-z])|log_\{[^{}]*\}|"
    + "|".join(NAMES)
    + rf"|[a-z{GREEK}]{_SCRIPT}'*|\*\*|[-+*/^!(){{}}\[\]|,]"
)
_MAX_LENGTH, _MAX_DEPTH, _MAX_DIGITS = 300, 40, 1000
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_ENDS = ("", "+", "-", ")", "]", "}", ",")


class NotAnExpression(ValueError):
    """Text that is no expression this parser knows, or one too large to evaluate."""


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Tree:
    """Return the tree of ``text``, which is in lower case and has no spaces. Raises NotAnExpression."""
    return _Parser(text).parse()


class _Parser:
    r"""Recursive descent over ``+ - * / ^ !``, implicit products, ``\frac``, ``\sqrt``, functions and groups."""

    def __init__(self, text: str) -> None:
        number = re.fullmatch(r"\d+(?:\.\d*)?|\.\d+", text)
        if len(text) > (_MAX_DIGITS if number else _MAX_LENGTH):
            raise NotAnExpression(f"{len(text)} characters are too long for an answer")
        self.tokens = _TOKEN.findall(text.replace("**", "^"))
        if "".join(self.tokens) != text.replace("**", "^") or not text:
            raise NotAnExpression(f"unreadable characters in {text!r}")
        self.position = 0
        self.depth = 0
        self.bars = 0

    def parse(self) -> Tree:
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

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise NotAnExpression(f"{token!r} is missing")

    def _sum(self) -> Tree:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise NotAnExpression("nested too deeply")
        value = self._product()
        while self._peek() in ("+", "-"):
            value = (self._take(), value, self._product())
        self.depth -= 1
        return value

    def _product(self) -> Tree:
        value = self._signed()
        while not self._at_end():
            operator = self._take() if self._peek() in ("*", "/") else "*"
            value = (operator, value, self._signed())
        return value

    def _at_end(self) -> bool:
        token = self._peek()
        return token in _ENDS or (token == "|" and self.bars > 0)

    def _signed(self) -> Tree:
        negative = False
        while self._peek() in ("+", "-"):
            negative ^= self._take() == "-"
        value = self._power()
        return ("negative", value) if negative else value

    def _power(self) -> Tree:
        base = self._factorial()
        if self._peek() != "^":
            return base
        self._take()
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise NotAnExpression("nested too deeply")
        value = ("^", base, self._signed())
        self.depth -= 1
        return value

    def _factorial(self) -> Tree:
        value = self._atom()
        while self._peek() == "!":
            self._take()
            value = ("!", value)
        return value

    def _atom(self) -> Tree:
        token = self._take()
        if token in _CLOSING:
            return self._group(_CLOSING[token])
        if token == "|" and not self.bars:
            self.bars += 1
            value = self._sum()
            self.bars -= 1
            self._expect("|")
            return ("abs", value)
        if token and (token[0].isdigit() or token[0] == "."):
            return self._number(token)
        if token == "\\frac":
            return ("/", self._argument(), self._argument())
        if token == "\\binom":
            return ("binom", self._argument(), self._argument())
        if token == "\\sqrt":
            return self._root()
        if token.startswith("log_") or token in FUNCTIONS:
            return self._function(token)
        if token == "pi" or token == "π":
            return ("constant", "pi")
        if token in ("e", "i"):
            return ("constant", token)
        if token == "f" and self._peek() in ("(", "^"):
            return self._applied(token)
        if token and (token[0].isalpha()):
            return ("symbol", token)
        raise NotAnExpression(f"unexpected {token!r}")

    def _applied(self, name: str) -> Tree:
        """A function of which only the name is known, or its inverse: ``f(x)`` is no product."""
        inverse = self.tokens[self.position : self.position + 6] == [*"^{-1}("]
        if inverse:
            self.position += 5
        if self._peek() != "(":
            return ("symbol", name)
        self._take()
        return ("apply", f"{name}^-1" if inverse else name, self._group(")"))

    def _group(self, closing: str) -> Tree:
        bars, self.bars = self.bars, 0
        value = self._sum()
        self._expect(closing)
        self.bars = bars
        return value

    def _number(self, token: str) -> Tree:
        """A number, or a mixed one: a whole number right before a fraction of whole numbers."""
        number = ("number", Fraction(token.rstrip(".")))
        if self._peek() == "\\frac" and token.isdigit() and not self._follows_a_factor():
            before = self.position
            self._take()
            parts = (self._argument(), self._argument())
            if all(part[0] == "number" and part[1].denominator == 1 for part in parts):
                return ("+", number, ("/", *parts))
            self.position = before
        return number

    def _follows_a_factor(self) -> bool:
        """Return True if a factor is right before the token just taken, which it is multiplied with."""
        before = self.tokens[self.position - 2] if self.position > 1 else ""
        return before[-1:].isalnum() or before in (")", "]", "}")

    def _argument(self) -> Tree:
        r"""Parse the argument of a command: a group, or one character as in ``\frac12``."""
        token = self._peek()
        if token == "{":
            self._take()
            return self._group("}")
        if token.isdigit() and len(token) > 1:
            self.tokens[self.position : self.position + 1] = [token[0], token[1:]]
        return self._atom()

    def _root(self) -> Tree:
        degree: Tree | None = None
        if self._peek() == "[":
            self._take()
            degree = self._group("]")
        value = self._atom() if self._peek() == "(" else self._argument()
        return ("sqrt", value) if degree is None else ("^", value, ("/", ("number", Fraction(1)), degree))

    def _function(self, name: str) -> Tree:
        exponent: Tree | None = None
        if self._peek() == "^":
            self._take()
            exponent = self._argument() if self._peek() == "{" else self._signed_atom()
        if exponent in (("negative", ("number", Fraction(1))), ("number", Fraction(-1))):
            if name not in INVERTIBLE:
                raise NotAnExpression(f"{name}^-1 may be an inverse function or a power")
            name, exponent = INVERTIBLE[name], None
        argument = self._atom() if self._peek() in ("(", "{", "[") else self._factors()
        if name.startswith("log_"):
            base = parse(name[len("log_{") : -1])
            value: Tree = ("/", ("ln", argument), ("ln", base))
        else:
            value = ("ln" if name == "log" else name, argument)
        return value if exponent is None else ("^", value, exponent)

    def _signed_atom(self) -> Tree:
        if self._peek() == "-":
            self._take()
            return ("negative", self._atom())
        return self._atom()

    def _factors(self) -> Tree:
        r"""The argument of a function without parentheses: factors side by side, as in ``\sin 2x``."""
        value = self._signed_power()
        while (
            not self._at_end() and self._peek() not in ("*", "/", "(", "[", *FUNCTIONS) and self._peek()[:4] != "log_"
        ):
            value = ("*", value, self._power())
        return value

    def _signed_power(self) -> Tree:
        if self._peek() == "-":
            self._take()
            return ("negative", self._power())
        return self._power()
