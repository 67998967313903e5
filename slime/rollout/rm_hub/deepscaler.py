"""The rule reward of DeepScaleR: the boxed answer after the reasoning, or nothing."""

from __future__ import annotations

from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_mathd, grade_answer_sympy, ground_truth_answer

__all__ = ["final_part", "get_deepscaler_rule_based_reward"]


def final_part(response: str) -> str | None:
    """Return the text after the last ``</think>``, or the part after ``###Response``; None without either marker."""
    if "</think>" in response:
        return response.rsplit("</think>", 1)[1]
    parts = response.split("###Response")
    return parts[1] if len(parts) > 1 else None


def get_deepscaler_rule_based_reward(response: str, label: str | int | float | None) -> int:
    """Return 1 when the last box of the final part equals the label, else 0 (also without marker, box or label)."""
    part = final_part(response)
    given = None if part is None else extract_answer(part)
    truth = ground_truth_answer(label)
    if given is None or truth is None:
        return 0
    return int(grade_answer_mathd(given, truth) or grade_answer_sympy(given, truth))
