r"""Answers and labels whose verdicts follow from how they were made, for the rules that compare with labels.

Every pair begins with a value (a fraction, a root, a set, some words); the two texts are written from it, or from
another value where they must differ. Nothing here calls a grader. ``python -m tests.support.reward_pairs`` writes the
files of ``tests/data/rewards/pairs``.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data" / "rewards" / "pairs"
Written = tuple[str, str, bool, str]
"""An answer, a label, whether the answer is right, and why."""


@dataclass
class Pair:
    """A response, a label and the reward (for ``dapo``, whether it is right)."""

    rule: str
    family: str
    response: str
    label: Any
    expected: float
    why: str
    metadata: dict[str, Any] = field(default_factory=dict)


def reduced(rng: random.Random, *bottoms: int) -> Fraction:
    """A fraction that is no integer."""
    while True:
        number = Fraction(rng.randint(1, 400), rng.choice(bottoms or (2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 16, 20, 25)))
        if number.denominator > 1:
            return number


def fraction_forms(value: Fraction) -> list[str]:
    p, q = abs(value.numerator), value.denominator
    sign = "-" if value < 0 else ""
    forms = [f"{sign}{p}/{q}", *(rf"{sign}\{name}{{{p}}}{{{q}}}" for name in ("frac", "dfrac", "tfrac"))]
    forms += [
        rf"{sign}\frac{{{p}}}{{{q}}}\,",
        rf"\left({sign}\frac{{{p}}}{{{q}}}\right)",
        rf"${sign}\frac{{{p}}}{{{q}}}$",
    ]
    if sign:
        forms.append(rf"\frac{{-{p}}}{{{q}}}")
    elif p > q:
        forms.append(rf"{p // q}\frac{{{p % q}}}{{{q}}}")
    if p < 10 and q < 10:
        forms.append(rf"{sign}\frac{p}{q}")
    return forms


def decimal(value: Fraction) -> str:
    """The digits of a fraction whose denominator has the factors 2 and 5 only."""
    places = next(k for k in range(40) if (value * 10**k).denominator == 1)
    digits = f"{abs(value.numerator) * 10**places // value.denominator:0{places + 1}d}"
    point = len(digits) - places
    return ("-" if value < 0 else "") + digits[:point] + ("." + digits[point:] if places else "")


def of_fractions(rng: random.Random) -> Iterator[Written]:
    value = reduced(rng) * rng.choice((1, 1, -1))
    label, answer = rng.sample(fraction_forms(value), 2)
    yield answer, label, True, "the same fraction"
    yield rng.choice(fraction_forms(-value)), label, False, "the other sign"
    other = value + Fraction(rng.choice((-1, 1)), value.denominator)
    if other.denominator > 1 and other:
        yield rng.choice(fraction_forms(other)), label, False, "another numerator"
    times = rng.randint(2, 5)
    unreduced = rf"\frac{{{times * value.numerator}}}{{{times * value.denominator}}}"
    yield unreduced, f"{value.numerator}/{value.denominator}", False, "PRM800K: a fraction must be reduced"


def of_decimals(rng: random.Random) -> Iterator[Written]:
    value = reduced(rng, 2, 4, 5, 8, 10, 16, 20, 25, 40, 100) * rng.choice((1, -1))
    label = rng.choice(fraction_forms(value))
    yield decimal(value), label, True, "a decimal of the same value"
    yield decimal(value + Fraction(1, 10 ** rng.randint(9, 18))), label, False, "off by less than a billionth"
    yield decimal(value) + "0", decimal(value), True, "a zero at the end"


def of_small_numbers(rng: random.Random) -> Iterator[Written]:
    n, k = rng.randint(30, 900), rng.randint(2, 9)
    yield rf"\frac{{1}}{{2^{{{n}}}}}", rf"\frac{{1}}{{2^{{{n + 1}}}}}", False, "half of it"
    yield rf"2^{{-{n}}}", rf"\frac{{1}}{{2^{{{n}}}}}", True, "a negative exponent"
    yield rf"{k}\times 10^{{-{n}}}", rf"{k + 1}\times 10^{{-{n}}}", False, "a small number is not another small one"
    yield rf"{k}\cdot 10^{{-{n}}}\pi", rf"\frac{{{k}\pi}}{{10^{{{n}}}}}", True, "a small multiple of pi"
    yield rf"{k}\cdot 10^{{-{n}}}\pi", rf"\frac{{{k}\pi}}{{10^{{{n + 1}}}}}", False, "a tenth of it"


def of_e_notation(rng: random.Random) -> Iterator[Written]:
    digits, exponent = rng.randint(11, 99), rng.randint(2, 8)
    small, large = Fraction(digits, 10 ** (exponent + 1)), digits * 10**exponent
    e = rng.choice("eE")
    yield f"{digits / 10}{e}-{exponent}", decimal(small), True, "E notation of a small number"
    yield f"{digits}{e}{rng.choice(('', '+'))}{exponent}", str(large), True, "E notation of an integer"
    yield f"{digits}{e}{exponent + 1}", str(large), False, "another exponent"
    yield f"{digits}e", f"{digits + 3}e{exponent}", False, "a multiple of e is no E notation"
    yield rf"{digits}e^{{{exponent}}}", f"{digits}e{exponent}", False, "a power of e is no E notation"


def of_integers(rng: random.Random) -> Iterator[Written]:
    n = rng.randint(1000, 9_999_999)
    grouped = f"{n:,}"
    forms = [
        grouped, grouped.replace(",", "{,}"), grouped.replace(",", r",\!"), grouped.replace(",", r"\,"),
        grouped.replace(",", " "), f"+{n}", f"{n}.0", rf"\${n}", rf"{n}\%", rf"{n}^\circ", rf"{n}^{{\circ}}",
        rf"{n}\degree",
        rf"\textbf{{{n}}}", rf"\mathbf{{{n}}}", rf"\mathrm{{{n}}}", rf"\boldsymbol{{{n}}}", rf"\text{{{n}}}",
        rf"{{\color{{red}}{n}}}", rf"\color{{blue}}{{{n}}}", rf"\textcolor{{blue}}{{{n}}}", rf"{{\Large {n}}}",
        rf"\bf {n}",
        rf"{n}\text{{ cm}}", rf"{n}\textbf{{ miles}}", rf"{n}\textnormal{{ feet}}", f"{n} inches",
        rf"{n}\text{{ cm}}^2",
        rf"\displaystyle {n}", rf"x={n}", rf"N = {n}", rf"\,{n}\;", rf"\left({n}\right)", rf"\boxed{{{n}}}", f"{n}.",
        f"０{n}"[1:],
    ]  # fmt: skip
    for form in rng.sample(forms, 4):
        yield form, str(n), True, "the same integer"
    yield str(n + rng.choice((-1, 1))), str(n), False, "the next integer"
    yield f"-{n}", str(n), False, "the other sign"
    yield f"{n}{rng.randint(1, 9)}", str(n), False, "a digit more"
    yield rf"{n - 7}+7", str(n), False, "PRM800K: an integer wants a written integer"
    yield f"{n}.{rng.randint(1, 9)}", str(n), False, "no integer"
    long = rng.randint(10**40, 10**60)
    yield str(long + 1), str(long), False, "exact integers differ in the last digit"
    yield f"{long:,}", str(long), True, "thousands of a long integer"


def of_roots(rng: random.Random) -> Iterator[Written]:
    a, b = rng.randint(2, 30), rng.choice((2, 3, 5, 6, 7, 10, 11, 13, 15))
    yield rf"\sqrt{{{a * a * b}}}", rf"{a}\sqrt{{{b}}}", True, "a square out of the root"
    yield rf"\sqrt{{{a * a * b + 1}}}", rf"{a}\sqrt{{{b}}}", False, "another radicand"
    yield rf"\frac{{{a}}}{{\sqrt{{{b}}}}}", rf"\frac{{{a}\sqrt{{{b}}}}}{{{b}}}", True, "a rational denominator"
    yield rf"{a}\sqrt{b}" if b < 10 else rf"{a}√{b}", rf"{a} \cdot \sqrt{{{b}}}", True, "a root without braces"
    yield f"{a * math.sqrt(b):.{rng.randint(4, 14)}f}", rf"{a}\sqrt{{{b}}}", False, "rounded"
    yield rf"\sqrt[3]{{{a**3 * b}}}", rf"{a}\sqrt[3]{{{b}}}", True, "a cube out of the root"
    yield rf"{a + 1}-\sqrt{{{b}}}", rf"-\sqrt{{{b}}}+{a + 1}", True, "a sum in another order"
    yield rf"{a + 1}+\sqrt{{{b}}}", rf"{a + 1}-\sqrt{{{b}}}", False, "the conjugate"


def of_formulas(rng: random.Random) -> Iterator[Written]:
    x, y = rng.choice(
        (("x", "y"), (r"\alpha", r"\beta"), (r"\lambda", r"\mu"), ("a", "b"), (r"\theta", "r"), ("n", "k"))
    )
    a, b = rng.randint(1, 12), rng.randint(1, 12)
    yield rf"({x}+{a})({x}-{b})", rf"{x}^2+{a - b}{x}-{a * b}".replace("+-", "-"), True, "multiplied out"
    yield rf"({x}+{a})({x}-{b})", rf"{x}^2+{a - b}{x}+{a * b}".replace("+-", "-"), False, "another constant"
    yield rf"{x}+{y}", rf"{y} + {x}", True, "a sum in another order"
    yield rf"{x}-{y}", rf"{y}-{x}", False, "a difference the other way round"
    yield rf"\frac{{{x}}}{{{a + 1}}}", rf"{x}/{a + 1}", True, "a fraction in a line"
    yield rf"{x}^{{{a + 1}}}", rf"{x}^{{{a}}} \cdot {x}", True, "a power as a product"
    yield rf"{x}^{{{a + 1}}}", rf"{x}^{{{a + 2}}}", False, "another power"
    yield rf"\frac{{{x}^2-{a * a}}}{{{x}-{a}}}", rf"{x}+{a}", True, "a common factor"
    yield rf"\sqrt{{{x}^2}}", x, False, "not for negative values"
    yield rf"{x}_1+{x}_2", rf"{x}_{{2}}+{x}_{{1}}", True, "indices"
    yield rf"{x}_1-{x}_2", rf"{x}_2-{x}_1", False, "indices exchanged"
    yield rf"{a}{x}{y}+{b}z", rf"{b}z+{a}{y}{x}", True, "three variables"


def of_functions(rng: random.Random) -> Iterator[Written]:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    f = rng.choice(("sin", "cos", "tan"))
    yield rf"\{f}^{{-1}}({a}/10)", rf"\arc{f}(\frac{{{a}}}{{10}})", True, "the inverse function"
    yield rf"\{f}^{{-1}} x", rf"\frac{{1}}{{\{f} x}}", False, "no reciprocal"
    yield rf"\sin {2 * a}x", rf"2\sin {a}x\cos {a}x", True, "the double angle"
    yield rf"\sin {2 * a}x", rf"2\sin {a}x", False, "half of the double angle"
    yield rf"\ln {a * b}+\frac12", rf"\ln {a}+\ln {b}+0.5", True, "the logarithm of a product"
    yield rf"\ln {a + b}+\frac12", rf"\ln {a}+\ln {b}+0.5", a + b == a * b, "the logarithm of a sum"
    yield rf"\log_{a} {b * b * b}x", rf"\frac{{\ln ({b**3}x)}}{{\ln {a}}}", True, "a change of base"
    yield rf"e^{{{a}}}\cdot e^{{{b}}}", rf"e^{{{a + b}}}", True, "a product of powers"
    yield rf"e^{{{a}}}+e^{{{b}}}", rf"e^{{{a + b}}}", False, "a sum of powers"
    yield rf"\binom{{{a + b}}}{{{a}}}x", rf"{math.comb(a + b, a)}x", True, "a binomial coefficient"
    yield rf"{a}+{b}i", rf"{b}i+{a}", True, "a complex number"
    yield rf"{a}+{b}i", rf"{a}-{b}i", False, "its conjugate"
    yield rf"|x-{a}|", rf"\left|{a}-x\right|", True, "an absolute value"


def of_collections(rng: random.Random) -> Iterator[Written]:
    values = rng.sample([Fraction(n, 2) for n in range(-19, 20) if n % 2] + [Fraction(n, 4) for n in (1, 3, 5, 7)], 3)
    labels, answers = [rng.choice(fraction_forms(v)[:4]) for v in values], [decimal(v) for v in values]
    shuffled = [answers[1], answers[2], answers[0]]
    changed = [answers[0], answers[1], decimal(values[2] + 10)]

    def within(brackets: tuple[str, str], parts: list[str]) -> str:
        return brackets[0] + ", ".join(parts) + brackets[1]

    point, closed, braces = ("(", ")"), ("[", "]"), (r"\{", r"\}")
    yield within(point, answers), within(point, labels), True, "a point, entry by entry"
    yield within((r"\left(", r"\right)"), answers), within(point, labels), True, "a point in large brackets"
    yield within(point, shuffled), within(point, labels), False, "a point with its entries exchanged"
    yield within(point, changed), within(point, labels), False, "another entry"
    yield within(point, answers[:2]), within(closed, labels[:2]), False, "an open interval is no closed one"
    yield within(point, answers[:2]), within(point, labels), False, "another dimension"
    yield within(braces, shuffled), within(braces, labels), True, "the order of a set does not count"
    yield within((r"\left\{", r"\right\}"), answers), within(braces, labels), True, "a set in large braces"
    yield within(braces, changed), within(braces, labels), False, "another set"
    yield within(braces, answers), within(point, labels), False, "a set is no tuple"
    yield within(braces, answers[:2]), within(braces, labels), False, "a subset"
    yield ",".join(answers), ", ".join(labels), True, "a list, entry by entry"
    a, b, c, d = sorted(rng.sample(range(-50, 50), 4))
    yield rf"({c},{d})\cup({a},{b}]", rf"({a}, {b}] \cup ({c}, {d})", True, "a union in another order"
    yield rf"({a},{b})\cup({c},{d})", rf"({a},{b}]\cup({c},{d})", False, "another end of an interval"
    yield rf"(-\infty, {a})", rf"\left(-\infty,{a}\right)", True, "half a line"
    yield rf"({a}, +\infty)", rf"({a},\infty)", True, "infinity with its sign"
    yield rf"(-\infty, {a}]", rf"(-\infty,{a})", False, "another end of half a line"
    yield f"({d * d + 1},000)", f"({d * d + 1},0)", False, "thousands are no entries"
    yield rf"x\in[{a},{b}]", rf"[{a}, {b}]", True, "membership"
    root = rng.choice((2, 3, 5, 7))
    yield rf"{b}\pm\sqrt{{{root}}}", rf"{b}-\sqrt{{{root}}}, {b}+\sqrt{{{root}}}", True, "both signs"
    yield rf"{b}\pm\sqrt{{{root}}}", rf"{b}+\sqrt{{{root}}}", False, "one of both"


def of_relations(rng: random.Random) -> Iterator[Written]:
    x, n = rng.choice("xyt"), rng.randint(2, 99)
    le, ge = rng.choice((r"\le", r"\leq", r"\leqslant", "≤")), rng.choice((r"\ge", r"\geq", r"\geqslant", "≥"))
    yield rf"{x}{le} {n}", rf"{x} \leq {n}", True, "synonyms of at most"
    yield rf"{x}{ge} {n}", rf"{x}\geq{n}", True, "synonyms of at least"
    yield rf"{n} {ge} {x}", rf"{x} \leq {n}", True, "the other way round"
    yield rf"{x}{le} {n}", rf"{x} \geq {n}", False, "the other relation"
    yield rf"{x} \lt {n}", rf"{x}<{n}", True, "less than"
    yield rf"{x} < {n}", rf"{x}\leq {n}", False, "less than is not at most"
    yield rf"{x}\ne {n}", rf"{x}\neq {n}", True, "synonyms of unequal"
    yield rf"{x}<={n}", str(n), False, "a relation is no number"
    yield rf"-{n}<{x}{le} {n}", rf"{n}{ge} {x}>-{n}", True, "a chain the other way round"
    yield rf"y={n}x+1", rf"y = 1+{n}x", True, "an equation"
    yield rf"y={n}x+1", rf"{n}x+1=y", True, "an equation the other way round"
    yield rf"y={n}x+1", rf"y={n}x-1", False, "another equation"
    yield rf"f(x)={n}x", rf"{n}x", True, "a named function"
    yield rf"x \to {n}", rf"x\rightarrow {n}", True, "synonyms of arrows"
    yield rf"x\leftarrow {n}", rf"x\rightarrow {n}", False, "the other arrow"


def of_texts(rng: random.Random) -> Iterator[Written]:
    right, wrong = rng.sample("ABCDE", 2)
    for form in rng.sample(
        [r"\textbf{(%s)}", r"\textbf{%s}", r"(%s)", r"\text{%s}", r"\text{(%s)}", r"\mathrm{%s}", r"\mathbf{(%s)}",
        r"\textrm{%s}"],
        3,
    ):  # fmt: skip
        yield form % right, right, True, "the letter of an option"
        yield form % wrong, right, False, "another letter"
    one, other = rng.sample(
        ["east", "west", "even", "odd", "Alice", "Boris", "Monday", "Friday", "parabola", "circle"], 2
    )
    yield rf"\text{{{one}}}", one, True, "a word"
    yield one.upper(), one, True, "a word in capitals"
    yield one, rf"\text{{{other}}}", False, "another word"
    yield "".join(sorted(one)), one, False, "the letters of a word in another order"
    base, digits = rng.randint(3, 9), "".join(rng.choices("12", k=rng.randint(3, 6)))
    yield rf"{digits}_{base}", rf"{digits}_{{{base}}}", True, "the base with braces"
    yield digits, rf"{digits}_{{{base}}}", False, "without its base"
    yield f"{digits}{base}", rf"{digits}_{base}", False, "the base as a digit"


def of_matrices(rng: random.Random) -> Iterator[Written]:
    a, b, c = (rng.randint(-20, 20) for _ in range(3))
    half = reduced(rng, 2, 4, 5)
    p, q = half.numerator, half.denominator
    column = rf"\begin{{pmatrix}} {a} \\ {b} \\ \frac{{{p}}}{{{q}}} \end{{pmatrix}}"
    yield rf"\begin{{pmatrix}}{a}\\{b}\\{decimal(half)}\end{{pmatrix}}", column, True, "a column, entry by entry"
    yield rf"\begin{{bmatrix}}{a}\\{b}\\{p}/{q}\end{{bmatrix}}", column, True, "square brackets"
    yield rf"\begin{{pmatrix}}{a}&{b}&{p}/{q}\end{{pmatrix}}", column, False, "a row is no column"
    yield rf"\begin{{pmatrix}}{a}\\{b}\\{c + 100}\end{{pmatrix}}", column, False, "another entry"


def of_sizes(rng: random.Random) -> Iterator[Written]:
    n, m = rng.randint(10**5, 10**12), rng.randint(2, 9)
    yield rf"x^{{{n}}}", "x", False, "a large power"
    yield rf"x^{{x^{{x^{{x^{m}}}}}}}", "x", False, "a tower"
    yield rf"{m}^{{{m}^{{{m}^{{{m}^{m}}}}}}}", rf"{m}^{{{m}^{m}}}\pi", False, "a tower of numbers"
    yield rf"\frac{{10^{{{30 + m}}}+1}}{{3}}", rf"\frac{{10^{{{30 + m}}}}}{{3}}", False, "large rationals are exact"
    yield rf"\sqrt{{10^{{{60 + 2 * m}}}+1}}", rf"10^{{{30 + m}}}\cdot \frac{{2}}{{2}}", False, "nearly a power of ten"


FAMILIES: dict[str, tuple[Callable[[random.Random], Iterator[Written]], int]] = {
    "fractions": (of_fractions, 24), "decimals": (of_decimals, 20), "small numbers": (of_small_numbers, 12),
    "E notation": (of_e_notation, 12), "integers": (of_integers, 16), "roots": (of_roots, 12),
    "formulas": (of_formulas, 12), "functions": (of_functions, 12), "collections": (of_collections, 14),
    "relations": (of_relations, 10), "texts": (of_texts, 12), "matrices": (of_matrices, 10), "sizes": (of_sizes, 6),
}  # fmt: skip
AROUND = (
    r"\boxed{%s}",
    r"We conclude that the answer is $\boxed{%s}$.",
    r"\[\boxed{%s}\]",
    r"**Answer:** \boxed{%s}<|im_end|>",
)


def written(rng: random.Random) -> Iterator[tuple[str, Written]]:
    for family, (make, times) in FAMILIES.items():
        for _ in range(times):
            yield from ((family, one) for one in make(rng))


def math_pairs() -> Iterator[Pair]:
    rng = random.Random("math")
    for family, (answer, label, right, why) in written(rng):
        yield Pair("math", family, rng.choice(AROUND) % answer, label, int(right), why)


def deepscaler_pairs() -> Iterator[Pair]:
    rng = random.Random("deepscaler")
    for family, (answer, label, right, why) in written(rng):
        if rng.random() < 0.35:
            box = rng.choice(AROUND) % answer
            response, counts = rng.choice(
                [
                    (rf"<think>maybe \boxed{{0}}</think> {box}", True), (f"hm</think>{box}", True),
                    (f"###Response {box}", True),
                    (rf"###Response \boxed{{?}} ###Response {box}", True), (f"<think>{box}</think> I said it.", False),
                    (box, False),
                ]
            )  # fmt: skip
            why = why if counts else "only a box after the marker counts"
            yield Pair("deepscaler", family, response, label, int(right and counts), why)


def dapo_pairs() -> Iterator[Pair]:
    rng = random.Random("dapo")
    for _ in range(36):
        n = rng.randint(2, 99_999)
        forms = [
            f"{n}", f"${n}$", rf"\boxed{{{n}}}", rf"$\boxed{{{n}}}$", f"x = {n}", f"{n:,}", f"{n} dollars",
            f"{n} degrees",
            rf"{n}^\circ", rf"\textbf{{{n}}}", rf"\text{{{n}}}", rf"{n}\text{{ cm}}".replace(" cm", "cm"), f" {n} ",
            f"{n}<|im_end|>",
        ]  # fmt: skip
        for form in rng.sample(forms, 3):
            yield Pair(
                "dapo", "integers", f"Thus.\n{rng.choice(('Answer', 'answer', 'ANSWER'))}: {form}", str(n), 1, "Minerva"
            )
        yield Pair("dapo", "integers", f"Answer: {n + 1}", str(n), 0, "another integer")
        yield Pair("dapo", "integers", f"The result is {n}.", str(n), 0, "no Answer line")
        yield Pair("dapo", "integers", f"Answer: {n}\nAnswer: {n + 1}", str(n), 0, "the last line counts")
        yield Pair("dapo", "integers", f"Answer: {n}" + " so" * 120, str(n), 0, "only the last 300 characters are read")
        yield Pair(
            "dapo",
            "labels",
            f"Answer: {n}",
            rng.choice([n, float(n), f"{n}.0", [str(n)], {"ground_truth": n}]),
            1,
            "labels",
        )
        value = reduced(rng, 2, 4, 5, 8)
        p, q = value.numerator, value.denominator
        yield Pair("dapo", "fractions", rf"Answer: \frac{{{p}}}{{{q}}}", rf"\frac{{{p}}}{{{q}}}", 1, "the same text")
        yield Pair("dapo", "fractions", f"Answer: {p + q}/{q}", f"{p}/{q}", 0, "another fraction")
        base = rng.randint(3, 9)
        yield Pair("dapo", "bases", f"Answer: {n}_{base}", f"{n}_{base}", 1, "the same text")
        yield Pair("dapo", "bases", f"Answer: {n}{base}", f"{n}_{base}", 0, "an underscore is no group of digits")


def gpqa_pairs() -> Iterator[Pair]:
    rng = random.Random("gpqa")
    words = ["iron", "copper", "zinc", "silver", "gold", "lead", "tin", "nickel", "cobalt", "barium", "neon", "argon"]
    says = [
        "Answer: %s", "The answer is (%s).", "The correct answer is **%s**.", r"\boxed{%s}", r"\boxed{\text{%s}}",
        "%s", "(%s)",
        "<think>Perhaps A, B, C or D.</think>Final answer: %s", "So option %s is correct.", "Answer: %s<|im_end|>",
    ]  # fmt: skip
    for _ in range(60):
        choices = rng.sample(words, 4)
        right = rng.randrange(4)
        wrong = (right + rng.randint(1, 3)) % 4
        letter, other = "ABCD"[right], "ABCD"[wrong]
        label = rng.choice(
            [letter, f"({letter})", right, choices[right], [letter], {"ground_truth": letter}, f'["{letter}"]']
        )
        say, options = rng.choice(says), {"choices": choices}
        yield Pair("gpqa", "letters", say % letter, label, 1.0, "the right letter", options)
        yield Pair("gpqa", "letters", say % other, label, 0.0, "another letter", options)
        yield Pair("gpqa", "texts", f"It must be {choices[right]}, I think", letter, 1.0, "the right text", options)
        yield Pair("gpqa", "texts", f"It must be {choices[wrong]}, I think", letter, 0.0, "another text", options)
        n, sign = rng.randint(2, 99), rng.choice(["<>", "≤≥", "+-"])
        signs = [f"x {s} {n}" for s in sign]
        yield Pair("gpqa", "signs", signs[0], "A", 1.0, "the right sign", {"choices": signs})
        yield Pair("gpqa", "signs", signs[1], "A", 0.0, "the other sign", {"choices": signs})


def f1_pairs() -> Iterator[Pair]:
    rng = random.Random("f1")
    words = [
        "river",
        "tower",
        "north",
        "queen",
        "paper",
        "stone",
        "light",
        "music",
        "horse",
        "bridge",
        "silver",
        "garden",
    ]
    for _ in range(60):
        common, mine, theirs = rng.randint(1, 3), rng.randint(0, 3), rng.randint(0, 3)
        drawn = rng.sample(words, common + mine + theirs)
        both, only_mine, only_theirs = drawn[:common], drawn[common : common + mine], drawn[common + mine :]
        given, gold = both + only_mine, both + only_theirs
        rng.shuffle(given)
        dressed = rng.choice(["%s", "The %s.", "<think>Hm, it?</think>a %s!", "%s<|im_end|>"]) % " ".join(given).title()
        score = 2 * common / (len(given) + len(gold))
        yield Pair("f1", "words", dressed, " ".join(gold), score, "2 common / (given + gold)")
        yield Pair("f1", "several golds", dressed, ["zebra", " ".join(gold)], score, "the best of the golds")
        yield Pair(
            "f1", "several golds", " ".join(gold), json.dumps(["zebra", " ".join(gold)]), 1.0, "JSON text of the golds"
        )
        rest = [word for word in words if word not in drawn]
        yield Pair("f1", "words", " ".join(rest[:2]), " ".join(gold), 0.0, "no common word")
        yes = rng.choice(["yes", "no", "noanswer"])
        yield Pair("f1", "closed", f"{yes}, {given[0]}", yes, 0.0, "a closed answer has to be met exactly")
        yield Pair("f1", "closed", f"{yes.title()}.", yes, 1.0, "a closed answer")


PAIRS: dict[str, Callable[[], Iterator[Pair]]] = {
    "math": math_pairs, "deepscaler": deepscaler_pairs, "dapo": dapo_pairs, "gpqa": gpqa_pairs, "f1": f1_pairs,
}  # fmt: skip


def lines(rule: str) -> list[str]:
    """The pairs of one rule, each once, as lines of JSON."""
    return list(dict.fromkeys(json.dumps(asdict(pair), ensure_ascii=False) for pair in PAIRS[rule]()))


def main() -> None:
    DATA.mkdir(exist_ok=True)
    for rule in PAIRS:
        (DATA / f"{rule}.jsonl").write_text("\n".join(lines(rule)) + "\n")


if __name__ == "__main__":
    main()
