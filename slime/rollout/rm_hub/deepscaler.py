"""The rule reward of DeepScaleR: the boxed answer after the reasoning, or nothing."""

from __future__ import annotations

from slime.rollout.rm_hub.math_utils import equals_label, extract_answer

__all__ = ["final_part", "get_deepscaler_rule_based_reward"]


def final_part(response: str) -> str | None:
    """Return the text after the last ``</think>``, else after the last ``###Response``; None without either marker."""
    for marker in ("</think>", "###Response"):
        if marker in response:
            return response.rsplit(marker, 1)[1]
    return None


def get_deepscaler_rule_based_reward(response: str, label: object) -> int:
    """Return 1 when the last box of the final part equals the label, else 0 (also without marker, box or label)."""
    part = final_part(response)
    return int(part is not None and equals_label(extract_answer(part), label))
