r"""Answers in the shape in which engines return them, made together with the outcome that each must have.

Every case begins with what is answered (a number, a letter, some words) and so with whether it is right; around it
comes what engines leave in a response: reasoning, closed, begun in the prompt, empty or cut off; other answers that
were considered; white space, other scripts; and the tokens that ended the generation. Outcomes follow from how a case
was made and from the published rules of each task. Nothing here calls a grader.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

ENDS = (
    "", "<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>", "<|end_of_text|>", "<|return|>", "<|end|>", "<eos>",
    "<end_of_turn>", "<｜end▁of▁sentence｜>", "<|user|>", "[EOS]", "[e~[", "<|im_end|>\n", "<|im_end|><|endoftext|>",
    "<|im_end|>\n<|endoftext|>", "</s></s></s>", "<|END_OF_TURN_TOKEN|>", "<|eom_id|>",
)  # fmt: skip
OPENINGS = ("", "\n\n", "  ", "Sure!\n", "因此，", "Вывод. ", "✅ ", " ", "> ", "**Solution.**\r\n")


@dataclass
class Case:
    """One response and what its reward must be."""

    kind: str
    response: str
    label: Any
    expected: Any
    why: str
    metadata: dict[str, Any] = field(default_factory=dict)


def reasoning(rng: random.Random, considered: str) -> tuple[str, bool]:
    """Return a text to put before an answer, which may consider others, and whether ``</think>`` is in it."""
    inside = f"Let me see.\n{considered}\nNo, wait, 再想想 🤔.\n"
    before = rng.choice(
        ("", "", f"<think>\n{inside}</think>\n\n", f"{inside}</think>\n\n", "<think>\n\n</think>\n\n",
         f"<think>{inside}</think><think>\n{inside}</think>")
    )  # fmt: skip
    return before, "</think>" in before


def end(rng: random.Random) -> str:
    return rng.choice(("", "", " ", "\n")) + rng.choice(ENDS)


def fraction(rng: random.Random) -> tuple[int, int]:
    """Return a reduced fraction that is no integer."""
    bottom = rng.choice((2, 3, 5, 7, 11, 13))
    return rng.choice([n for n in range(1, 60) if n % bottom]), bottom


def written_number(rng: random.Random) -> tuple[str, str, str]:
    """Return (label, an equal answer written in another way, a different answer), as one writes them in LaTeX."""
    n = rng.randint(2, 99_999)
    top, bottom = fraction(rng)
    return rng.choice(
        (
            (str(n), str(n), str(n + 1)),
            (str(-n), f"-{n}", str(n)),
            (str(n), rf" {n} ", rf"\frac{{1}}{{{n}}}"),
            (str(1000 * n), f"{1000 * n:,}", f"{1000 * n + 1:,}"),
            (rf"\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}", f"{top + bottom}/{bottom}"),
            (f"{top}/{bottom}", rf"\dfrac{{{top}}}{{{bottom}}}", rf"\dfrac{{{bottom}}}{{{top}}}"),
            (rf"\frac{{{top}}}{{2}}" if top % 2 else "0.25", str(top / 2) if top % 2 else "0.25", "0.1234"),
            (str(n), rf"{n}\%", rf"{n + 1}\%"),
            (str(n), rf"\${n}", rf"\${n + 2}"),
            (str(n), rf"{n}^\circ", rf"{n + 90}^\circ"),
            (str(n), rf"{n}\text{{ cm}}", rf"{n + 3}\text{{ cm}}"),
            (f"({n},{top})", rf"\left({n}, {top}\right)", f"({top + n + 1}, {n})"),
            (rf"\text{{Blau {top}}}", f"Blau {top}", f"Rot {top}"),
        )
    )


def boxed(rng: random.Random, kind: str, count: int) -> Iterator[Case]:
    """``math``: the last box, wherever it is. ``deepscaler``: the last box after reasoning, which has to be there."""
    for number in range(count):
        label, same, other = written_number(rng)
        before, closed = reasoning(rng, rf"Is it \boxed{{{other}}}?")
        counts = closed or kind == "math"
        right = bool(number % 2)
        given = same if right else other
        box = rf"\boxed{{{given}}}" if number % 5 else rf"Not \boxed{{{other}}} but \boxed{{{given}}}"
        text = rng.choice(OPENINGS) + f"The result is ${box}$." + end(rng)
        yield Case(kind, before + text, label, int(right and counts), "the last box")


def boxed_oddities(rng: random.Random, kind: str, count: int) -> Iterator[Case]:
    for number in range(count):
        n = rng.randint(2, 9999)
        shut = "<think>hm</think>" if kind == "deepscaler" or number % 2 else ""
        for response, expected, why in (
            (rf"{shut}so \boxed {n}{rng.choice(ENDS)}", 1, "a box without braces ends where the response ends"),
            (rf"{shut}so $\fbox{{{n}}}$" + end(rng), 1, "an fbox where there is no box"),
            (rf"{shut}so \boxed{{{n}" + rng.choice(("", " and then")), 0, "cut off inside of the box"),
            (f"{shut}it is {n}." + end(rng), 0, "no box"),
            (rf"{shut}\boxed{{}}" + end(rng), 0, "an empty box"),
            (rf"<think>Perhaps \boxed{{{n + 1}}}. And", 0, "cut off in the reasoning"),
            (rf"<think>\boxed{{{n}}}</think>I cannot tell." + end(rng), int(kind == "math"), "the box is reasoning"),
        ):
            yield Case(kind, response, str(n), expected, why)


def roots(rng: random.Random, kind: str, count: int) -> Iterator[Case]:
    """Values that need algebra: few, they are slow."""
    for number in range(count):
        a, b = rng.randint(2, 9), rng.choice((2, 3, 5, 7))
        given = rf"{a}\sqrt{{{b}}}" if number % 2 else rf"{a + 1}\sqrt{{{b}}}"
        response = rf"<think>.</think>\boxed{{{given}}}" + end(rng)
        yield Case(kind, response, rf"\sqrt{{{a * a * b}}}", number % 2, "a root")


def dapo(rng: random.Random, count: int) -> Iterator[Case]:
    """The last ``Answer:`` line of the last 300 characters, as an integer."""
    for number in range(count):
        n = rng.choice((rng.randint(0, 999), rng.randint(-99, -1), rng.randint(10**17, 10**19)))
        label = rng.choice((str(n), n, f" {n}"))
        right = bool(number % 2)
        given = n if right else n + 1
        before, _ = reasoning(rng, f"Answer: {n + 1}")
        written = rng.choice(
            (f"{given}", f"${given}$", rf"\boxed{{{given}}}", rf"$\boxed{{{given}}}$", f"x = {given}", f" {given} ",
             rf"\text{{{given}}}", f"{given} dollars", f"{given} cm", rf"{given}^\circ",
             f"{given:,}" if n >= 0 else f"{given}")
        )  # fmt: skip
        line = rng.choice(("Answer: ", "answer:", "ANSWER : ", "Final Answer: ", "Answer:\n", "Answer:\t")) + written
        after = rng.choice(("", "", "\n", "\nThat is all."))
        yield dapo_case(before + rng.choice(OPENINGS) + line + after + end(rng), label, right, str(given))
    for _ in range(count // 8):
        n = rng.randint(1, 999)
        yield dapo_case(f"The result is {n}" + end(rng), str(n), False, "[INVALID]")
        yield dapo_case("Answer:" + rng.choice(ENDS), str(n), False, "[INVALID]")
        yield dapo_case(f"Answer: {n}\n" + "x" * 300 + end(rng), str(n), False, "[INVALID]")
        yield dapo_case("x" * 400 + f"\nAnswer: {n}" + end(rng), f"{n}.0", True, str(n))
        yield dapo_case(f"<think>Answer is {n}, hm", str(n), False, "[INVALID]")
        yield dapo_case(f"Answer: {n}.5" + end(rng), f"{n}.5", True, f"{n}.5")
        yield dapo_case(f"Answer: {n}" + end(rng), f"{n}.5", False, f"{n}")
        yield dapo_case(f"Answer: {n}" + end(rng), f"{n:,}", True, f"{n}")


def dapo_case(response: str, label: Any, right: bool, taken: str) -> Case:
    expected = {"score": 1.0 if right else -1.0, "acc": right, "pred": taken}
    return Case("dapo", response, label, expected, "the last line with an answer")


WORDS = ("paris", "london", "river", "seven", "blue", "Ёлка", "東京", "naïve", "queen", "1984", "jazz", "oak", "zinc")


def f1(rng: random.Random, count: int) -> Iterator[Case]:
    """2PR / (P + R) with so many words in common; articles, punctuation and case are noise."""
    for _ in range(count):
        words = rng.sample(WORDS, 9)
        common, more, missing = rng.randint(0, 3), rng.randint(0, 3), rng.randint(0, 3)
        label = words[:common] + words[common : common + missing]
        given = words[:common] + words[6 : 6 + more]
        if not label:
            continue
        rng.shuffle(given)
        noisy = [rng.choice((w, w.upper(), f"the {w}", f"{w},", f'"{w}"', f"A {w}")) for w in given]
        text = rng.choice(("", "\n\n", "  ", "\t")) + " ".join(noisy) + rng.choice(("", ".", "!"))
        before, _ = reasoning(rng, " ".join(label))
        expected = 2 * common / (len(given) + len(label)) if common else 0.0
        yield Case("f1", before + text + end(rng), " ".join(label), expected, f"{common} words in common")
    for number in range(count // 8):
        given, label = rng.choice((("yes", "no"), ("no", "yes"), ("Yes.", "yes"), ("NO", "no"), ("yes it is", "yes")))
        right = given.lower().strip(".") == label
        yield Case("f1", given + end(rng), label, float(right), "yes and no are all or nothing")
        cut = f"<think>\nIt may be {label}" + ("" if number % 2 else ", or not")
        yield Case("f1", cut, label, 0.0, "cut off in the reasoning: no answer")


NAMED = (
    "Answer: {}", "answer: {}", "ANSWER: {}", "Answer:{}", "**Answer: {}**", "**Answer:** {}", "**Answer**: **{}**",
    "Answer: ({})", "Answer: {}.", "Answer: {})", "Answer: $\\text{{{}}}$", "Answer: \\text{{{}}}", "### Answer\n{}",
    "Answer: \\mathbf{{{}}}", "Answer: \\boxed{{{}}}", "Answer: \\({}\\)", "The answer is {}.", "The answer is ({}).",
    "The correct answer is {}", "So the correct option is {}.", "The final answer is: $\\boxed{{{}}}$", "I choose {}",
    "Correct choice: {}", "The answer is therefore {}.", "The answer is option {}.", "{} is the correct answer.",
    "{} is the answer", "Thus ({}) is correct.", "**{}** is the right choice.", "Option {} is the correct one.",
    "I would go with option {}.", "We pick ({})", "\\boxed{{{}}}", "\\boxed{{\\text{{{}}}}}", "$\\boxed{{({})}}$", "{}",
    "({})", "{}.", "**{}**", "It has to be {}, I think.", "因此选{}。", "答: {}", "So it is {} because of symmetry.",
)  # fmt: skip
ALSO = (
    "",
    "",
    "Option {0} is wrong, and so is {1}.\n",
    "Is it {0} or {1}? ",
    "First I took {0}. ",
    "(A look at {0}.)\n",
)
AFTERWARDS = ("", "", "\n", " A common mistake is to forget the sign.", " I am sure.")


def gpqa(rng: random.Random, count: int) -> Iterator[Case]:
    """The option that the response settles on, among ten letters."""
    letters = "ABCDEFGHIJ"
    for number in range(count):
        named = NAMED[number % len(NAMED)]
        label, wrong, third = rng.sample(letters, 3)
        right = bool(rng.randint(0, 1))
        given = label if right else wrong
        before, _ = reasoning(rng, f"Answer: {third}. The answer is {wrong if right else label}.")
        alone = named[0] == "{" or named in ("({})",)
        text = "" if alone else rng.choice(ALSO).format(third, wrong if right else label)
        text += named.format(given) + (rng.choice(AFTERWARDS) if not alone else "")
        asked = label if number % 3 else rng.choice((label.lower(), f"({label})"))
        yield Case("gpqa", before + text + end(rng), asked, float(right), f"{named} names {given}")
    texts = ["10^-4 eV", "10^4 eV", "x > 5", "x < 5", "α", "β", "blue", "dark blue"]
    for number in range(count // 6):
        truth, other = rng.sample(range(len(texts)), 2)
        given = truth if number % 2 else other
        response = f"<think>{texts[other]}</think>The answer is {letters[given]}." + end(rng)
        metadata: dict[str, Any] = {"choices": texts}
        asked = (texts[truth], truth, None)[number % 3]
        if asked is None:
            metadata |= rng.choice(
                ({"correct_answer": texts[truth]}, {"answer_text": texts[truth]}, {"correct_letter": letters[truth]})
            )
        yield Case("gpqa", response, asked, float(given == truth), "choices that are told by their text", metadata)
    colors = {"choices": ["red", "green", "blue", "dark blue"]}
    for _ in range(count // 20):
        yield Case("gpqa", "it is green, i think" + end(rng), "green", 1.0, "the text of the choice", colors)
        yield Case("gpqa", "it is dark blue" + end(rng), "blue", 0.0, "the text of another choice", colors)
        yield Case("gpqa", "<think>the answer is B. but what of", "B", 0.0, "cut off in the reasoning")
        yield Case("gpqa", "I do not know." + end(rng), rng.choice("AI"), 0.0, "a pronoun is no option")
        yield Case("gpqa", "A photon is emitted." + end(rng), "A", 0.0, "an article is no option")


def ifbench(rng: random.Random, count: int) -> Iterator[Case]:
    """So many words, a last word, no comma: rules about the answer, of which the checkers see every character."""
    for number in range(count):
        words = rng.sample([word for word in WORDS if "," not in word], rng.randint(2, 6))
        right = bool(number % 2)
        ids, kwargs = rng.choice(
            (
                (["count:words"], [{"N": len(words) + (not right)}]),
                (["last:word"], [{"word": words[-1] if right else words[0]}]),
                (["count:words", "last:word"], [{"N": len(words)}, {"word": words[-1] if right else "cat"}]),
                (["first:word"], [{"word": words[0] if right else words[-1]}]),
            )
        )
        before, _ = reasoning(rng, "a, b, c")
        response = before + " ".join(words) + end(rng)
        metadata = {"instruction_id_list": ids, "kwargs": kwargs, "prompt_text": "q", "record_id": number}
        yield Case("ifbench", response, None, float(right), str(ids), metadata)


def in_a_box(rng: random.Random, count: int) -> Iterator[Case]:
    """``boxed_<type>`` sees the content of the last box only."""
    for number in range(count):
        right = bool(number % 2)
        letter, other = rng.sample("ABCDEFGH", 2)
        before, _ = reasoning(rng, rf"\boxed{{{other}}}")
        given = letter if right else other
        yield Case("boxed_gpqa", rf"{before}Well, {other}: \boxed{{{given}}}" + end(rng), letter, float(right), "box")
        word, wrong = rng.sample(WORDS, 2)
        given = word if right else wrong
        yield Case("boxed_f1", rf"{before}some words \boxed{{{given}}}" + end(rng), word, float(right), "box")
        braceless = rf"{before}\boxed {given}" + rng.choice(ENDS)
        yield Case("boxed_f1", braceless, word, float(right), "a box without braces")
        yield Case("boxed_f1", f"{word}" + end(rng), word, 0.0, "no box")
        n = rng.randint(1, 99)
        expected = {"score": 1.0 if right else -1.0, "acc": right, "pred": str(n)}
        response = rf"Answer: 7 \boxed{{Answer: {n}}}" + end(rng)
        yield Case("boxed_dapo", response, n if right else n + 1, expected, "box")


def boxes(rng: random.Random, kind: str) -> Iterator[Case]:
    yield from boxed(rng, kind, 350)
    yield from boxed_oddities(rng, kind, 30)
    yield from roots(rng, kind, 8)


GENERATORS: dict[str, Callable[[random.Random], Iterator[Case]]] = {
    "math": lambda rng: boxes(rng, "math"),
    "deepscaler": lambda rng: boxes(rng, "deepscaler"),
    "dapo": lambda rng: dapo(rng, 400),
    "f1": lambda rng: f1(rng, 400),
    "gpqa": lambda rng: gpqa(rng, 600),
    "ifbench": lambda rng: ifbench(rng, 300),
    "boxed": lambda rng: in_a_box(rng, 80),
}


def answers(kind: str) -> list[Case]:
    """Return the cases of one kind, the same ones in every run."""
    return list(GENERATORS[kind](random.Random(kind)))
