"""The values of expressions: rationals exactly, everything else to 160 digits with a bound on its error.

Every operation is bounded: what would take long (towers of powers, factorials of large numbers) is no value.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from slime.rollout.rm_hub.expressions import NotAnExpression, Tree

if TYPE_CHECKING:
    from mpmath import mpc, mpf

__all__ = ["equal_values"]

DIGITS = 160
_EXACT_BITS = 20_000
_MOST_BITS = 1e9
_LARGEST_ANGLE = 1e50
_LARGEST_FACTORIAL = 2000
_POINTS = 6
_KNOWN_TO = 1e-30
"""Relative error down to which two values are known before they are called equal."""


class _Undefined(Exception):
    """There is no value at this point: a division by zero."""


@dataclass(frozen=True, slots=True)
class _Approximate:
    """A number, complex where needed, and a bound on its error, numbers of ``mpmath``."""

    value: Any
    error: Any


Value = Fraction | _Approximate
Point = Mapping[str, Fraction]


@functools.cache
def _digits() -> Any:
    """Return an ``mpmath`` context of our own precision. Importing it takes long, and most answers need none."""
    import mpmath

    context = mpmath.mp.clone()
    context.dps = DIGITS
    return context


def equal_values(first: Tree, second: Tree) -> bool:
    """True when two expressions have the same value, for all values of their symbols.

    Expressions with symbols are compared at several points. False when a value cannot be determined.
    """
    symbols = sorted(_symbols(first) | _symbols(second))
    rng = random.Random(0)
    defined = 0
    try:
        for number in range(_POINTS if symbols else 1):
            point = {s: Fraction(_sign(number, rng) * rng.randint(3, 9973), 997) for s in symbols}
            try:
                if not _same(_value(first, point), _value(second, point)):
                    return False
            except (_Undefined, ZeroDivisionError):
                continue
            defined += 1
    except (NotAnExpression, OverflowError, ValueError, TypeError):
        return False
    return defined > 0


def _sign(number: int, rng: random.Random) -> int:
    return (1, -1)[number] if number < 2 else rng.choice((-1, 1))


def _symbols(tree: Tree) -> set[str]:
    if tree[0] == "symbol":
        return {tree[1]}
    return set().union(*(_symbols(part) for part in tree[1:] if isinstance(part, tuple)))


def _same(first: Value, second: Value) -> bool:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    a, b = _lift(first), _lift(second)
    error, size = a.error + b.error, max(abs(a.value), abs(b.value))
    if not error <= max(_KNOWN_TO * size, _KNOWN_TO):  # "not": an error may be no number
        raise NotAnExpression("the digits that count have canceled out")
    return bool(abs(a.value - b.value) <= 4 * error)


def _value(tree: Tree, point: Point) -> Value:
    operator, operands = tree[0], tree[1:]
    if operator == "number":
        return Fraction(operands[0])
    if operator == "symbol":
        return point[operands[0]]
    if operator == "constant":
        context = _digits()
        value = {"pi": +context.pi, "e": +context.e, "i": context.mpc(0, 1)}[operands[0]]
        return _Approximate(value, 0 * context.eps if operands[0] == "i" else value * context.eps)
    if operator == "apply":
        return _unknown(operands[0], _value(operands[1], point))
    return _OPERATIONS[operator](*(_value(operand, point) for operand in operands))


def _unknown(function: str, argument: Value) -> Fraction:
    """Some value of a function that only has a name: the same for the same argument."""
    if not isinstance(argument, Fraction):
        raise NotAnExpression(f"{function} of a number that is not known exactly")
    return Fraction(random.Random(f"{function}({argument})").randint(1, 10**9), 997)


def _lift(number: Value) -> _Approximate:
    if isinstance(number, _Approximate):
        return number
    context = _digits()
    value = context.mpf(number.numerator) / number.denominator
    exact = number.denominator & (number.denominator - 1) == 0 and number.numerator.bit_length() <= context.prec
    return _Approximate(value, context.mpf(0) if exact else abs(value) * context.eps)


def _rounded(value: mpf | mpc, error: mpf) -> _Approximate:
    """A result whose operands' errors make ``error``, with that of its own rounding."""
    return _Approximate(value, abs(error) + 4 * abs(value) * _digits().eps)


def _bounded(number: Fraction) -> Value:
    small = max(number.numerator.bit_length(), number.denominator.bit_length()) <= _EXACT_BITS
    return number if small else _lift(number)


def _add(a: Value, b: Value) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _bounded(a + b)
    a, b = _lift(a), _lift(b)
    return _rounded(a.value + b.value, a.error + b.error)


def _negative(a: Value) -> Value:
    return -a if isinstance(a, Fraction) else _Approximate(-a.value, a.error)


def _multiply(a: Value, b: Value) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _bounded(a * b)
    a, b = _lift(a), _lift(b)
    return _rounded(a.value * b.value, abs(a.value) * b.error + abs(b.value) * a.error + a.error * b.error)


def _divide(a: Value, b: Value) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _bounded(a / b)
    a, b = _lift(a), _lift(b)
    if abs(b.value) <= b.error:
        raise _Undefined
    value = a.value / b.value
    return _rounded(value, (a.error + abs(value) * b.error) / (abs(b.value) - b.error))


def _power(a: Value, b: Value) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction) and b.denominator == 1:
        bits = max(a.numerator.bit_length(), a.denominator.bit_length())
        if bits * abs(b.numerator) <= _EXACT_BITS or abs(a) in (0, 1):
            return Fraction(a**b.numerator)
    base, exponent = _lift(a), _lift(b)
    context = _digits()
    size, real = abs(base.value), context.re(exponent.value)
    if size <= base.error:  # zero, as far as is known
        if real <= exponent.error:
            raise _Undefined
        return _Approximate(context.mpf(0), (2 * base.error) ** min(real, 1))
    bits = abs(exponent.value) * (abs(context.log(size, 2)) + 10)
    if bits > _MOST_BITS:
        raise NotAnExpression(f"a power of {float(bits):.0g} bits is too large")
    value = context.power(base.value, exponent.value)
    by_base = abs(exponent.value) * (base.error / size)
    by_exponent = (abs(context.log(size)) + 4) * (exponent.error + abs(exponent.value) * context.eps)
    return _rounded(value, abs(value) * (by_base + by_exponent))


def _factorial(a: Value) -> Value:
    if isinstance(a, Fraction) and a.denominator == 1:
        if not 0 <= a <= _LARGEST_FACTORIAL:
            raise NotAnExpression(f"factorial of {a}")
        return Fraction(math.factorial(a.numerator))
    a = _lift(a)
    if abs(a.value) > _LARGEST_FACTORIAL:
        raise NotAnExpression("a factorial is too large")
    value = _digits().gamma(a.value + 1)
    return _rounded(value, abs(value) * a.error * 1000)


def _binomial(n: Value, k: Value) -> Value:
    return _divide(_factorial(n), _multiply(_factorial(k), _factorial(_add(n, _negative(k)))))


def _function(name: str, slope: Callable[[Any, Any], Any], largest: float = math.inf) -> Callable[[Value], Value]:
    """Return the operation of ``mpmath``'s function ``name``; ``slope(context, x)`` is its derivative."""

    def operation(x: Value) -> Value:
        context = _digits()
        a = _lift(x)
        if abs(a.value) > largest:
            raise NotAnExpression(f"{name} of a number that is too large")
        value = getattr(context, name)(a.value)
        return _rounded(value, slope(context, a.value) * a.error if a.error else 0)

    return operation


def _logarithm(a: Value) -> Value:
    if a == 1:
        return Fraction(0)
    a = _lift(a)
    if abs(a.value) <= a.error:
        raise _Undefined
    return _rounded(_digits().log(a.value), a.error / (abs(a.value) - a.error))


def _absolute(a: Value) -> Value:
    return abs(a) if isinstance(a, Fraction) else _Approximate(abs(a.value), a.error)


_OPERATIONS: dict[str, Callable[..., Value]] = {
    "+": _add,
    "-": lambda a, b: _add(a, _negative(b)),
    "*": _multiply,
    "/": _divide,
    "^": _power,
    "!": _factorial,
    "negative": _negative,
    "binom": _binomial,
    "sqrt": lambda a: _power(a, Fraction(1, 2)),
    "ln": _logarithm,
    "abs": _absolute,
    "exp": lambda a: _power(_value(("constant", "e"), {}), a),
    "sin": _function("sin", lambda c, x: c.cos(x), _LARGEST_ANGLE),
    "cos": _function("cos", lambda c, x: c.sin(x), _LARGEST_ANGLE),
    "tan": _function("tan", lambda c, x: 1 + c.tan(x) ** 2, _LARGEST_ANGLE),
    "cot": _function("cot", lambda c, x: 1 + c.cot(x) ** 2, _LARGEST_ANGLE),
    "sec": _function("sec", lambda c, x: c.sec(x) * c.tan(x), _LARGEST_ANGLE),
    "csc": _function("csc", lambda c, x: c.csc(x) * c.cot(x), _LARGEST_ANGLE),
    "sinh": _function("sinh", lambda c, x: c.cosh(x), 1e6),
    "cosh": _function("cosh", lambda c, x: c.sinh(x), 1e6),
    "tanh": _function("tanh", lambda c, x: 1 - c.tanh(x) ** 2, 1e6),
    "arcsin": _function("asin", lambda c, x: 1 / c.sqrt(1 - x**2)),
    "arccos": _function("acos", lambda c, x: 1 / c.sqrt(1 - x**2)),
    "arctan": _function("atan", lambda c, x: 1 / (1 + x**2)),
    "arccot": _function("acot", lambda c, x: 1 / (1 + x**2)),
    "arcsec": _function("asec", lambda c, x: 1 / (x**2 * c.sqrt(1 - x**-2))),
    "arccsc": _function("acsc", lambda c, x: 1 / (x**2 * c.sqrt(1 - x**-2))),
    "arcsinh": _function("asinh", lambda c, x: 1 / c.sqrt(1 + x**2)),
    "arccosh": _function("acosh", lambda c, x: 1 / c.sqrt(x**2 - 1)),
    "arctanh": _function("atanh", lambda c, x: 1 / (1 - x**2)),
}
