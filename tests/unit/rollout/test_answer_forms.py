"""Answers in the forms that models write and labels in those that data sets have. Verdicts follow from mathematics."""

from __future__ import annotations

import asyncio
import copy
import time
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from slime.algorithms.reward_types import REWARD_TYPES
from slime.rollout import rm_hub
from slime.rollout.rm_hub import async_rm, rules
from slime.rollout.rm_hub.labels import accepted_answers
from slime.rollout.rm_hub.math_utils import grade_answer_verl, mathd_normalize_answer
from slime.utils import processing_utils
from slime.utils.types import Sample
from tests.support.arguments import run_args

ANSWERS = [
    (r"\frac{1}{2^{50}}", r"\frac{1}{2^{51}}", 0),
    ("3.14159265358979", r"\pi", 0),
    ("1.4142135623731", r"\sqrt{2}", 0),
    ("2.5e-3", "0.0025", 1),
    ("1e3", "1000", 1),
    ("24e", "3e8", 0),
    ("6e", "2e3", 0),
    ("e-5", "1e-5", 0),
    (r"\textbf{(B)}", "B", 1),
    (r"\textbf{5}", "5", 1),
    (r"x\le3", r"x\leq3", 1),
    (r"x\ge5", r"x\geq 5", 1),
    (r"45\degree", "45", 1),
    ("+5", "5", 1),
    (r"+\infty", r"\infty", 1),
    (r"(-\infty,+\infty)", r"(-\infty,\infty)", 1),
    (r"\{1,2\}", "(1,2)", 0),
    (r"\{a,b\}", "(a,b)", 0),
    (r"\tan^{-1}(2)", r"\frac{1}{\tan 2}", 0),
    (r"\sin^{-1}x", r"\frac{1}{\sin x}", 0),
    (r"\tan^{-1}(2)", r"\arctan 2", 1),
    (r"\alpha+\beta", r"\beta+\alpha", 1),
    (r"\lambda^2", r"\lambda\lambda", 1),
    (r"\frac{\theta}{2}", r"\theta/2", 1),
    (r"\frac{10}{5}", "2", 0),
    ("12/3", "4", 0),
    (r"\frac{1}{3} \textbf{meters}", "1/3", 1),
    (r"125\textnormal{ miles}", "125", 1),
    ("(1,000)", "(1,0)", 0),
    ("[3,000]", "[3,0]", 0),
    ("(1,000)", "(1000)", 1),
    ("x^{1000000}", "x", 0),
    ("x^{99999999999}", "x", 0),
    ("x^{x^{x^x}}", "x", 0),
    ("x^{x^{x^{x^x}}}", "x", 0),
    (r"\{1,2\}", r"\{2,1\}", 1),
    (r"\{1,2\}", r"\{1,2,2\}", 1),
    ("{1,2}", r"\{1,2\}", 1),
    (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}", 1),
    (r"\pm 3", "3,-3", 1),
    (r"x \in [1,2]", "[1,2]", 1),
    (r"3\le x", r"x\ge 3", 1),
    (r"1<x\le 4", r"4\geq x>1", 1),
    (r"1<x\le 4", "1<x<4", 0),
    ("y=2x+3", "2x+3=y", 1),
    ("y=2x+3", "3+2x", 1),
    ("x=5.0", "5", 1),
    ("a+b+c", "c+b+a", 1),
    ("ab+bc+ca", "ca+ab+bc", 1),
    ("east", "seat", 0),
    (r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}", r"\begin{bmatrix}-7\\16\\5\end{bmatrix}", 1),
    (r"\begin{pmatrix} 1/2 & 2 \end{pmatrix}", r"\begin{pmatrix} 0.5&2\end{pmatrix}", 1),
    (r"\begin{pmatrix} 1/2 & 2 \end{pmatrix}", r"\begin{pmatrix} 0.5\\2\end{pmatrix}", 0),
    (r"(0,9)\cup(9,36)", r"(9,36)\cup(0,9)", 1),
    ("204_5", "204_{5}", 1),
    ("204_5", "2045", 0),
    (r"204_{\text{five}}", "204_5", 1),
    (r"\log_2 8", r"\log_{2}8", 1),
    (r"\log_2 5", r"\frac{\ln 5}{\ln 2}", 1),
    (r"\sin 2x", r"2\sin x\cos x", 1),
    (r"\frac{\frac{1}{2}}{3}", r"\frac{1}{6}", 1),
    (r"6\div\frac{1}{2}", "12.0", 0),
    (r"a/\frac{1}{2}", "2a", 1),
    (r"\frac12", ".5", 1),
    (r"\sqrt[3]{8x}", r"2\sqrt[3]{x}", 1),
    ("x_1+x_2", "x_2+x_1", 1),
    (r"3\frac12", "7/2", 1),
    ("3 1/2", "31/2", 0),
    ("3 1/2", r"\frac72", 1),
    ("2 3", "23", 0),
    ("1 000", "1000", 1),
    ("10^{40}+1", "10^{40}", 0),
    (r"\frac{10^{40}+1}{3}", r"\frac{10^{40}}{3}", 0),
    (r"\binom{5}{2}x", "10x", 1),
    ("n!", "n(n-1)!", 1),
    (r"\color{red}{5}", "5", 1),
    (r"{\Large 5}", "5", 1),
    (r"\textcolor{blue}{\frac12}", "0.5", 1),
    (r"\mathbf{\frac{1}{2}}", "0.5", 1),
    (r"\Delta", r"\delta", 0),
    ("½", "1/2", 1),
    ("x²", "x^2", 1),
    (r"2\sqrt3", "√12", 1),
    ("1{,}000", "1000", 1),
    ("(1{,}000, 2)", "(1000,2)", 1),
    ("(100,200)", "(100, 200.0)", 1),
    (r"-\frac12", r"\frac{-1}{2}", 1),
    (r"\frac{-2}{4}", r"-\frac{1}{2}", 0),
    ("f(x)=2x", "2x", 1),
    ("10,100", "10, 100", 1),
    (r"e^{i\pi}", "-1.0", 0),
    (r"\frac{e^{i\pi}}{3}", r"-\frac{1}{3}", 1),
    (r"\frac{a}{b+\frac{c}{d}}", r"\frac{ad}{bd+c}", 1),
    ("2e-5", "0.00002", 1),
    ("x<5", "x>5", 0),
    (r"x\to\infty", r"x \rightarrow \infty", 1),
    (r"\sin(10^{200})", r"\sin(10^{201})", 0),
    (r"\ln(x^2)", r"2\ln x", 0),
    (r"\sqrt{x^2}", "x", 0),
    (r"\frac{x^2-1}{x-1}", "x+1", 1),
    (r"\frac{1}{2}\text{ hour}", r"\frac{1}{2}", 1),
    (r"5\,\text{cm}", "5", 1),
    (r"5\ \mathrm{cm}", "5", 1),
    (r"\text{5 cm}", "5", 1),
    (r"\textit{even}", "even", 1),
    (r"\underline{12}", "12", 1),
    (r"\large 12", "12", 1),
    (r"\scriptstyle{12}", "12", 1),
    (r"\mathbb{R}", r"\R", 1),
    ("ℝ", r"\mathbb R", 1),
    (r"(-\infty,\infty)", r"\mathbb{R}", 0),
    (r"\emptyset", r"\varnothing", 1),
    (r"10\%", "0.1", 0),
    (r"1.0\times10^{-3}", "0.001", 1),
    (r"6.02 \times 10^{23}", "6.02e23", 0),
    (r"6.02 \times 10^{23}", r"6.03 \times 10^{23}", 0),
    (r"\frac{22}{7}", r"\pi", 0),
    (r"\frac{355}{113}", r"\pi", 0),
    ("0.1+0.2", "0.3", 1),
    ("2^{0.5}", r"\sqrt2", 1),
    (r"\sqrt{-4}", "2i", 1),
    ("e^{-2}", r"\frac{1}{e^2}", 1),
    (r"\frac{\sqrt{5}-1}{2}", r"\frac{2}{1+\sqrt{5}}", 1),
    (r"\cos\frac{\pi}{5}", r"\frac{1+\sqrt{5}}{4}", 1),
    (r"\arctan 1", r"\frac{\pi}{4}", 1),
    (r"\cot^{-1} 1", r"\frac{\pi}{4}", 1),
    (r"\sec^2 x", r"1+\tan^2 x", 1),
    (r"\sin x^2", r"(\sin x)^2", 0),
    (r"\sin^2 x", r"(\sin x)^2", 1),
    (r"\log_{10} 100x", r"2+\log_{10} x", 1),
    (r"\ln(2x)-\ln x", r"\ln 2", 1),
    (r"\frac{dy}{dx}", "y'", 0),
    ("x' ", "x", 0),
    ("f^{-1}(x)", r"\frac{1}{f(x)}", 0),
    ("f^{-1}(x)", r"\frac{x}{f}", 0),
    ("f(x)", "fx", 0),
    (r"A\cup B", r"B\cup A", 1),
    (r"A\cap B", r"A \cup B", 0),
    (r"p\land q", r"p \wedge q", 1),
    (r"p\to q", r"q\to p", 0),
    (r"\vec{v}", r"\vec v", 1),
    (r"\overline{AB}", "AB", 0),
    (r"\angle ABC", r"\angle CBA", 0),
    (r"\triangle ABC", "ABC", 0),
    (r"30^\circ", "30 degrees", 1),
    (r"x=1 \text{ or } x=2", "x=1, x=2", 1),
    (r"x=1\text{ or }2", "1,2", 1),
    (r"1 \text{ and } 2", "1, 2", 1),
    ("2, 3", "3, 2", 0),
    (r"\{x: x>0\}", r"\{x : x > 0\}", 1),
    ("[0,1)", "(0,1]", 0),
    ("(1,2)", "1,2", 0),
    (r"\langle 1,2\rangle", r"\langle 1, 2.0\rangle", 1),
    ("1:2", "2:1", 0),
    ("1:2", "1 : 2", 1),
    ("3:4", r"\frac34", 0),
    ("12:30", "12.30", 0),
    (r"1 \frac{1}{2}", "1.5", 1),
    (r"-1\frac{1}{2}", "-1.5", 1),
    (r"2 \cdot \frac{1}{2}x", "x", 1),
    (r"1.5\%", "1.5", 1),
    (r"\$1,234.56", "1234.56", 1),
    ("1 234.5", "1234.5", 1),
    (r"0.\overline{3}", r"\frac13", 0),
    (r"\frac{1}{3}", r"0.\overline{3}", 0),
    ("5!", "120", 0),
    (r"\frac{5!}{3}", "40", 0),
    (r"\lfloor x \rfloor", r"\lceil x\rceil", 0),
    (r"\lfloor 2.5 \rfloor", "2", 0),
    (r"\max(1,2)", r"\max(2,1)", 0),
    (r"\sum_{i=1}^n i", r"\frac{n(n+1)}{2}", 0),
    (r"\int_0^1 x dx", r"\frac12", 0),
    (r"2\pi r^2", "2πr²", 1),
    (r"\tfrac{1}{2}bh", r"\frac{bh}{2}", 1),
    ("x^{-1}", "1/x", 1),
    ("x^{1/2}", r"\sqrt{x}", 1),
    (r"3^{x}\cdot 3^{y}", "3^{x+y}", 1),
    ("(a+b)^2", "a^2+b^2", 0),
    ("(a+b)^3", "a^3+3a^2b+3ab^2+b^3", 1),
    ("-(x-1)", "1-x", 1),
    ("--5", "5", 1),
    ("+-5", "-5", 1),
    ("0", "-0", 1),
    ("0.0", "0", 1),
    ("00", "0", 1),
    ("007", "7", 1),
    ("5.", "5", 1),
    (".5", "0.5", 1),
    (r"\infty", r"-\infty", 0),
    (r"\infty", r"\text{infinity}", 1),
    (r"\text{undefined}", r"\text{none}", 0),
    (r"\text{yes}", "Yes.", 0),
    ("yes", r"\text{Yes}", 1),
    (r"1,2,\ldots,10", r"1,2,\dots,10", 1),
    ("2x+1=0", "2x=-1", 0),
    (r"\binom{n}{2}", r"\frac{n(n-1)}{2}", 1),
    (r"n\choose 2", r"\binom n2", 0),
    ("1+2i", "1+2j", 0),
    (r"(3, \frac{\pi}{2})", r"(3,90^\circ)", 0),
    (r"\sqrt[4]{16x^4}", "2x", 0),
    ("x>2", "2<x", 1),
    (r"x>2\text{ or }x<1", "x>2, x<1", 1),
    ("1 < x < 2", "(1,2)", 0),
    (r"\frac{1}{2},\frac{1}{3}", r"\{\frac13,\frac12\}", 1),
    (r"\begin{cases}1\\2\end{cases}", r"\begin{cases}1\\3\end{cases}", 0),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", 0),
    ("1_2", "1_3", 0),
    ("FF_{16}", "ff_{16}", 1),
    ("12_{10}", "12", 0),
    ("x_{12}", "x_{1}2", 0),
    ("a_1 b", "a_{1b}", 0),
    ("x^{2}3", "x^{23}", 0),
    ("2^{3}4", "2^{34}", 0),
    (r"\frac1{23}", r"\frac{12}{3}", 0),
    (r"\sqrt{2}3", r"\sqrt{23}", 0),
    (r"\text{(A)} 5", "A", 0),
    ("(B) 5", "5", 0),
    (r"\text{Tuesday}", r"\text{tuesday}", 1),
    ("f(x)+1", "1+f(x)", 1),
    ("f(2x)", "f(x+x)", 1),
    ("f(2x)", "2f(x)", 0),
    (r"x\not= 5", r"x\ne 5", 1),
    (r"\{\}", r"\emptyset", 1),
    ("(1011)_2", "1011_2", 1),
    ("[1,000, 2,000]", "[1000,2000]", 1),
    ("(1e3, 2)", "(1000, 2)", 1),
    (r"\text{\textbf{(B)}}", "B", 1),
    (r"\sin^{-2} x", r"\frac{1}{\sin^2 x}", 1),
    (r"\log^{-1}(2)", r"\frac{1}{\log 2}", 0),
    ("2^{100000}x", "4^{50000}x", 1),
    ("2^{100000}x", "2^{100001}x", 0),
    (r"\left|x-1\right|", "|1-x|", 1),
    ("x<=5", "5", 0),
    ("x<=5", "x>=5", 0),
    ("x!=5", "5", 0),
    (r"x\leftarrow 5", r"x\rightarrow 5", 0),
    (r"3\text{ or }4", "3", 0),
    (r"\frac{1}{23}", r"\frac{12}{3}", 0),
]


@pytest.mark.parametrize(("answer", "label", "right"), ANSWERS)
def test_answers(answer, label, right):
    assert grade_answer_verl(f"so \\boxed{{{answer}}}", label) is bool(right)
    assert grade_answer_verl(f"so \\boxed{{{label}}}", answer) is bool(right)


def test_spaces_between_numbers_stay_visible():
    assert mathd_normalize_answer("3 1/2") == mathd_normalize_answer(r"3\frac{1}{2}") != mathd_normalize_answer("31/2")
    assert mathd_normalize_answer("2 3") != mathd_normalize_answer("23")


LABELS: list[Any] = [  # all of them say 42
    "42", 42, 42.0, np.int64(42), np.float32(42), np.str_("42"), Decimal(42), b"42", ["42"], ("42", "forty-two"), [42],
    np.array(["42"], dtype=object), np.array([42]), {"ground_truth": "42"}, {"style": "rule", "ground_truth": 42},
    {"ground_truth": {"target": ["42"]}}, '["42"]', '["42", "43"]', "['42']", '{"ground_truth": "42"}', '"42"',
    "Two times 21 is <<2*21=42>>42.\n#### 42", {"answer": "so\n#### 42"}, r"So it is \boxed{42}.", [r"\boxed{42}"],
]  # fmt: skip
RESPONSES = {
    "math": r"\boxed{%s}", "deepscaler": r"</think>\boxed{%s}", "dapo": "Answer: %s", "f1": "%s",
}  # fmt: skip


@pytest.mark.parametrize("kind", RESPONSES)
@pytest.mark.parametrize("label", LABELS, ids=repr)
def test_labels(kind, label):
    if kind in ("dapo", "f1") and "boxed" in str(label):
        return  # a box in the label is for rules that look for boxes
    for answer, right in (("42", True), ("41", False)):
        reward = rules.grade(kind, RESPONSES[kind] % answer, label, {})
        assert (reward["acc"] if kind == "dapo" else reward == 1) is right


@pytest.mark.parametrize("kind", ["math", "deepscaler", "dapo", "f1"])
@pytest.mark.parametrize("label", [{}, {"score": 1}, object()])
def test_what_is_no_label_is_an_error(kind, label):
    with pytest.raises(ValueError, match="a label"):
        rules.grade(kind, RESPONSES[kind] % "42", label, {})


@pytest.mark.parametrize("label", [None, "", "  ", [], float("nan"), np.array([])])
def test_no_label_is_no_reward(label):
    for kind, response in RESPONSES.items():
        reward = rules.grade(kind, response % "42", label, {})
        assert (reward["score"] if kind == "dapo" else reward) in (0, -1.0)


@pytest.mark.parametrize("text", ["[1,2]", "(0,1]", "[[1,2],[3,4]]"])
def test_brackets_of_numbers_are_no_list_of_labels(text):
    assert grade_answer_verl(rf"\boxed{{{text}}}", text)
    assert not grade_answer_verl(r"\boxed{1}", text)


@pytest.mark.parametrize(
    ("answer", "label", "right"),
    [
        ("0.00001", 0.00001, True), ("1e-05", 0.00001, True),
         ("0.00001", "0.00001", True), ("204_5", "204_5", True), ("2045", "204_5", False),
        ("10112", "1011_2", False), ("1011_2", "1011_2", True), ("5.0", "5.0", True), ("5", "5.0", True),
        ("1000", "1e3", True), ("1e3", "1e3", True), ("1000", 1e3, True),
        ("12345678901234567890", 12345678901234567890, True),
        ("12345678901234567891", 12345678901234567890, False), ("٤٢", "42", False),
    ],
)  # fmt: skip
def test_labels_of_dapo(answer, label, right):
    assert rules.grade("dapo", f"Answer: {answer}", label, {})["acc"] is right


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        ("x > 5", "A", 0), ("x < 5", "A", 1), ("x > 5", "B", 1), (r"$x \gt 5$", "B", 1), ("x<5", "A", 1),
        ("Answer: B", np.int64(1), 1), ("Answer: B", ["B"], 1), ("Answer: B", {"ground_truth": "B"}, 1),
        ("Answer: B", '["B"]', 1), ("Answer: B", "1", 1), ("Answer: A", np.str_("B"), 0),
        ("Answer: B", np.float64(1), 1),
    ],
)  # fmt: skip
def test_labels_and_signs_of_gpqa(response, label, right):
    assert rules.grade("gpqa", response, label, {"choices": ["x < 5", "x > 5"]}) == right


@pytest.mark.parametrize(
    ("prediction", "label", "f1"),
    [
        ("Paris", ["Paris", "City of Light"], 1.0), ("Paris", np.array(["City of Light", "Paris"]), 1.0),
        ("light city", ["Paris", "City of Light"], 0.8), ("Paris", '["Paris", "City of Light"]', 1.0),
        ("no", ["yes", "no"], 1.0), ("Rome", ["Paris", "City of Light"], 0.0),
    ],
)  # fmt: skip
def test_f1_is_that_of_the_best_answer(prediction, label, f1):
    assert rules.grade("f1", prediction, label, {}) == pytest.approx(f1)


class Tokenizer:
    """Ids are the numbers of characters."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def conversation(*parts: tuple[str, int], **fields: Any) -> Sample:
    response = "".join(text for text, _ in parts)
    mask = [trained for text, trained in parts for _ in text]
    tokens = [0, *map(ord, response)]
    return Sample(
        index=0, response=response, response_length=len(response), tokens=tokens, loss_mask=mask, label="42", **fields
    )


@pytest.fixture
def tokenizer(monkeypatch):
    monkeypatch.setattr(rm_hub, "_tokenizer", lambda *_: Tokenizer())


TOOL = (r"<tool>\boxed{42}</tool>", 0)


async def test_only_the_policys_own_text_is_graded(tokenizer):
    args = run_args(rm_type="math", reward_workers=1)
    assert await async_rm(args, conversation(("I ask: 6*7", 1), TOOL)) == 0
    assert await async_rm(args, conversation((r"\boxed{42}", 1), (r"<tool>\boxed{41}</tool>", 0))) == 1
    assert await async_rm(args, conversation((r"\boxed{4", 1), ("tool", 0), ("2}", 1))) == 0


async def test_loading_the_tokenizer_does_not_stop_the_event_loop(monkeypatch):
    loading = asyncio.Event()
    loop = asyncio.get_running_loop()

    def load(*_):
        loop.call_soon_threadsafe(loading.set)  # runs only where the loop is free
        assert asyncio.run_coroutine_threadsafe(loading.wait(), loop).result(30)
        return Tokenizer()

    monkeypatch.setattr(rm_hub, "_tokenizer", load)
    args = run_args(rm_type="math", reward_workers=1)
    assert await async_rm(args, conversation((r"\boxed{42}", 1), (r"<tool>\boxed{41}</tool>", 0))) == 1
    assert loading.is_set()


async def test_samples_that_end_together_load_it_once(monkeypatch):
    loads = []

    def load(*_, **__):
        loads.append(1)
        time.sleep(0.1)
        return Tokenizer()

    monkeypatch.setattr(processing_utils, "load_tokenizer", load)
    rm_hub._load.cache_clear()
    args = run_args(rm_type="math", reward_workers=1)
    sample = conversation((r"\boxed{42}", 1), (r"<tool>\boxed{41}</tool>", 0))
    assert await asyncio.gather(*(async_rm(args, sample) for _ in range(4))) == [1] * 4
    rm_hub._load.cache_clear()
    assert loads == [1]


def test_own_text(tokenizer):
    args = run_args()
    assert rm_hub.own_text(args, conversation(("one", 1), TOOL, ("two", 1))) == "one \n two"
    for whole in (conversation(("one", 1), ("two", 1)), conversation(("one", 0), ("two", 0))):
        assert rm_hub.own_text(args, whole) == "onetwo"
    # of an earlier rollout: masked, and the policy's all the same
    partial = conversation(("old", 0), ("tool", 0), ("new", 1))
    partial.weight_version_spans = [{"version": "1", "start": 0, "end": 3}, {"version": "2", "start": 7, "end": 10}]
    assert rm_hub.own_text(args, partial) == "old \n new"
    odd = copy.deepcopy(partial)
    odd.loss_mask = [1]
    assert rm_hub.own_text(args, odd) == "oldtoolnew"


@pytest.mark.parametrize(
    ("kind", "fault"),
    [pytest.param("math", "burn_answer", marks=pytest.mark.slow), ("dapo", "eat_answer"), ("f1", "eat_answer")],
)
async def test_an_answer_that_exceeds_a_limit_is_wrong(monkeypatch, kind, fault):
    monkeypatch.setattr(rules, "PATH", f"tests.support.bad_rewards.{fault}")
    args = run_args(rm_type=kind, reward_workers=1, reward_time_limit=0.3)
    reward = await async_rm(args, Sample(index=0, response="x", label="x"))
    assert reward == REWARD_TYPES[kind].wrong


@pytest.mark.parametrize(
    "answer", [r"x^{1000000}", r"x^{99999999999}", r"x^{x^{x^x}}", r"x^{x^{x^{x^{x^x}}}}", "9^9^9^9", "(x!)!", "x!!!!!",
               r"(1+x)^{10^{18}}", r"\sin(10^{10^{10}}x)", r"e^{e^{e^{e^x}}}", r"\binom{10^9}{10^8}"],
)  # fmt: skip
def test_powers_and_towers_end_at_once(answer):
    from time import process_time

    began = process_time()
    assert grade_answer_verl(rf"\boxed{{{answer}}}", "x") is False
    assert process_time() - began < 0.5


@pytest.mark.parametrize("text", ['{"city": "Paris"}', '{"x": 5}', '{"H", "T"}', "{'H', 'T'}", '"a", "b"'])
def test_text_that_only_looks_like_json_is_a_label_itself(text):
    assert accepted_answers(text) == [text]
