"""Calls of the built-in rewards and their helpers. Outcomes follow from the rules of each task."""

from __future__ import annotations

from typing import Any

from slime.utils.types import Sample
from tests.support.arguments import run_args
from tests.support.reference_calls import Call

HUB = "slime.rollout.rm_hub."
MATH, DAPO = HUB + "math_utils.", HUB + "math_dapo_utils."
HERE = __name__


async def custom_rm(args: Any, sample: Any, **kwargs: Any) -> Any:
    """A reward for one sample, or for a list."""
    return [len(one.response) for one in sample] if isinstance(sample, list) else len(sample.response)


ARGS = run_args(rm_type="math", rollout_request_timeout=10.0)
CUSTOM = run_args(custom_rm_path=f"{HERE}.custom_rm", group_rm=True, rollout_request_timeout=10.0)
BOXED = r"so \boxed{1/2} at last"
RIGHT = {"score": 1.0, "acc": True, "pred": "42"}
CHOICES = {"choices": ["x", "y"], "correct_letter": "B"}


def answer(response: str, label: str) -> Sample:
    return Sample(prompt="q", response=response, label=label, status=Sample.Status.COMPLETED)


CALLS = [
    Call(HUB + "async_rm", lambda: {"args": ARGS, "sample": answer(BOXED, "0.5")}, 1),
    Call(HUB + "async_rm", lambda: {"args": CUSTOM, "sample": answer("four", ""), "evaluation": False}, 4),
    Call(HUB + "batched_async_rm", lambda: {"args": ARGS, "samples": [answer(BOXED, "0.5"), answer("7", "7")]}, [1, 0]),
    Call(HUB + "batched_async_rm", lambda: {"args": CUSTOM, "samples": [answer("four", ""), answer("", "")]}, [4, 0]),
    *(
        Call(path, {"solution_str": BOXED, "ground_truth": truth}, right)
        for path in (HUB + "grade_answer_verl", MATH + "grade_answer_verl")
        for truth, right in ((r"\frac{1}{2}", True), ("2", False))
    ),
    *(
        Call(path, {"response": response, "label": "0.5"}, reward)
        for path in (HUB + "get_deepscaler_rule_based_reward", HUB + "deepscaler.get_deepscaler_rule_based_reward")
        for response, reward in ((f"<think>no</think> {BOXED}", 1), (BOXED, 0))
    ),
    Call(HUB + "compute_score_dapo", {"solution_str": "Answer: 42", "ground_truth": "42"}, RIGHT),
    Call(DAPO + "compute_score", {"solution_str": "Answer: 42", "ground_truth": 42.0}, RIGHT),
    Call(
        DAPO + "compute_score",
        {
            "solution_str": r"\boxed{42} Answer: 1",
            "ground_truth": "42",
            "strict_box_verify": True,
            "pause_tokens_index": None,
        },
        RIGHT,
    ),
    *(
        Call(path, {"response": "The answer is (B)", "label": "B", **metadata}, 1.0)
        for path in (HUB + "compute_gpqa_reward", HUB + "gpqa.compute_gpqa_reward")
        for metadata in ({}, {"metadata": CHOICES})
    ),
    *(  # common words: cat; precision 1/2, recall 1
        Call(path, {"prediction": "The cat sat", "ground_truth": "a cat"}, (2 / 3, 1 / 2, 1.0))
        for path in (HUB + "f1_score", HUB + "f1.f1_score")
    ),
    Call(HUB + "f1.normalize_answer", {"s": "The  Cat, sat!"}, "cat sat"),
    *(Call(path, {"solution": BOXED}, "1/2") for path in (HUB + "extract_boxed_answer", MATH + "extract_boxed_answer")),
    Call(MATH + "extract_answer", {"passage": BOXED}, "1/2"),
    Call(MATH + "extract_answer", {"passage": "no box"}, None),
    Call(MATH + "grade_answer_mathd", {"given_answer": " 5 ", "ground_truth": "5"}, True),
    Call(MATH + "grade_answer_sympy", {"given_answer": "2/4", "ground_truth": "0.5"}, True),
    Call(MATH + "grade_answer_sympy", {"given_answer": "3", "ground_truth": "5"}, False),
    Call(MATH + "last_boxed_only_string", {"string": r"\boxed{1} \boxed{2}!"}, r"\boxed{2}"),
    Call(MATH + "last_boxed_only_string", {"string": r"\boxed{1}"}, r"\boxed{1}", also={"string": "s"}),
    Call(MATH + "mathd_normalize_answer", {"answer": " 5 "}, "5"),
    Call(MATH + "mathd_normalize_answer", {"answer": None}, None),
    Call(MATH + "remove_boxed", {"s": r"\boxed{x}"}, "x"),
    Call(
        DAPO + "is_correct_minerva",
        {"solution_str": "Answer: 42", "gt": r"\boxed{42}", "gt_need_extract": True},
        (True, "42"),
    ),
    Call(
        DAPO + "is_correct_minerva",
        {
            "solution_str": "Result 42",
            "gt": "42",
            "gt_need_extract": False,
            "answer_pattern": r"Result (\d+)",
        },
        (True, "42"),
    ),
    Call(DAPO + "is_correct_strict_box", {"pred": r"\boxed{42}", "gt": "42"}, (1, "42")),
    Call(DAPO + "is_correct_strict_box", {"pred": "42", "gt": "42", "pause_tokens_index": None}, (-1, None)),
    Call(DAPO + "last_boxed_only_string", {"string": r"\boxed{1} \boxed{2}!"}, r"\boxed{2}"),
    Call(DAPO + "last_boxed_only_string", {"string": r"\boxed{1}"}, r"\boxed{1}", also={"string": "s"}),
    Call(DAPO + "normalize_final_answer", {"final_answer": r"x = \text{1,000} dollars"}, "1000"),
    Call(DAPO + "remove_boxed", {"s": r"\boxed{x}"}, "x"),
    Call(DAPO + "verify", {"solution_str": "Answer: 42", "answer": "42"}, (True, "42")),
    Call(
        DAPO + "verify",
        {
            "solution_str": r"\boxed{42}",
            "answer": "41",
            "strict_box_verify": True,
            "pause_tokens_index": None,
        },
        (False, "42"),
    ),
]
