r"""Verdicts of math-verify on the pairs of ``tests.support.reward_pairs``, and the right one where they differ.

``python -m tests.support.second_opinion`` asks it (minutes) and writes ``second_opinion.jsonl`` of
``tests/data/rewards/pairs``: the pairs on which it differs from the verdict that they were made with, each with the
decision and its reason. A difference without a reason in ``DECISIONS`` is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from slime.rollout.rm_hub import rules
from slime.rollout.rm_hub.failure import RewardFailure
from slime.rollout.rm_hub.workers import RewardWorkers, WorkerLimits
from tests.support.reward_pairs import DATA, PAIRS

FILE = DATA / "second_opinion.jsonl"
DECISIONS = {  # by why the pair has its verdict
    "Minerva": "the rule removes fonts; math-verify finds no number in bare LaTeX without dollars",
    "no Answer line": "the rule of DAPO reads Answer lines only; math-verify takes any number",
    "only the last 300 characters are read": "a rule of DAPO about the place of the answer; math-verify has none",
    "only a box after the marker counts": "a rule of DeepScaleR about the place of the answer; math-verify has none",
    "E notation of an integer": "58e+8 is 5800000000; math-verify reads Euler's e",
    "E notation of a small number": "3.7e-3 is 0.0037; math-verify reads Euler's e",
    "a set is no tuple": "a set has no order, a tuple has; math-verify takes an answer in braces for either",
    "an open interval is no closed one": "the brackets differ; math-verify takes both for empty: the ends are turned",
    "thousands are no entries": "000 is no entry of a pair; math-verify reads it as 0",
    "off by less than a billionth": "the numbers differ; math-verify rounds to six digits",
    "PRM800K: a fraction must be reduced": "a rule of PRM800K; math-verify compares values only",
    "PRM800K: an integer wants a written integer": "a rule of PRM800K; math-verify compares values only",
    "the same integer": "fonts, colors, spaces between thousands and a full stop do not change a number",
    "a chain the other way round": "a < x <= b and b >= x > a say the same",
    "the other way round": "n >= x and x <= n say the same",
    "nearly a power of ten": "sqrt(10^70 + 1) is not 10^35; math-verify compares 15 digits",
    "a small number is not another small one": "the numbers differ; math-verify rounds both to 0",
    "a tenth of it": "the numbers differ; math-verify rounds both to 0",
    "half of it": "the numbers differ; math-verify rounds both to 0",
    "a root without braces": "the sign for a root is read as \\sqrt; math-verify does not know it",
    "rounded": "a root is irrational; math-verify rounds to six digits",
    "a word in capitals": "capitals do not make another word; math-verify takes letters for symbols",
    "the letters of a word in another order": "words are no products; math-verify takes letters for symbols",
    "without its base": "21111 is not 21111 in base 3; math-verify drops the base",
    "a closed answer": "words are no mathematics",
    "JSON text of the golds": "words are no mathematics",
    "the best of the golds": "words are no mathematics",
    "2 common / (given + gold)": "words are no mathematics",
    "the right letter": "an option may be named by a letter, an index or a text; math-verify compares the texts",
    "the right sign": "the text of an option stands for its letter; math-verify compares the texts",
    "the right text": "the text of an option stands for its letter; math-verify compares the texts",
}
"""In every one of these the verdict of the pair is right."""


def all_pairs() -> list[dict[str, Any]]:
    return [json.loads(line) for rule in PAIRS for line in (DATA / f"{rule}.jsonl").read_text().splitlines()]


def differences(pairs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ask math-verify of each pair; return those on which it differs, with its verdict and the decision."""
    pool = RewardWorkers(2, WorkerLimits(cpu_s=10.0))
    try:
        asked = [(pair, pool.submit(rules.PATH, "math_verify", pair["response"], pair["label"], {})) for pair in pairs]
        found = [{**pair, "math_verify": _verdict(answer)} for pair, answer in asked]
    finally:
        pool.close()
    return [
        {**pair, "decided": DECISIONS[pair["why"]]} for pair in found if (pair["expected"] == 1) != pair["math_verify"]
    ]


def _verdict(answer: Future[Any]) -> Any:
    """Return math-verify's verdict, 0 where it takes too long, as for ``--rm-type math_verify``."""
    try:
        return answer.result()
    except RewardFailure as e:
        if not e.by_answer:
            raise
        return 0


def main() -> None:
    FILE.write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in differences(all_pairs())))


if __name__ == "__main__":
    main()
