"""The built-in rewards that are rules, as one plain function: what worker processes compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.ifbench import compute_ifbench_reward, load_checkers
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.rm_hub.math_utils import grade_answer_verl


def _math(response: str, label: Any, metadata: Mapping[str, Any]) -> int:
    return int(grade_answer_verl(response, label))


def _deepscaler(response: str, label: Any, metadata: Mapping[str, Any]) -> int:
    return get_deepscaler_rule_based_reward(response, label)


def _dapo(response: str, label: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return compute_score(response, label)


def _f1(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    return f1_score(response, "" if label is None else label)[0]


RULES: dict[str, Callable[[str, Any, Mapping[str, Any]], Any]] = {
    "math": _math,
    "deepscaler": _deepscaler,
    "dapo": _dapo,
    "f1": _f1,
    "gpqa": compute_gpqa_reward,
    "ifbench": compute_ifbench_reward,
}
METADATA_KEYS = {
    "gpqa": ("choices", "valid_letters", "correct_letter", "correct_answer", "answer_text"),
    "ifbench": ("instruction_id_list", "kwargs", "prompt_text", "record_id"),
}
"""What a rule reads of a sample's metadata; the rest is not sent to a worker."""
FRESH = ("ifbench",)
"""Rules of other authors, which may keep what they like: each answer is graded in a process of its own."""
PATH = f"{__name__}.grade"


def grade(kind: str, response: str, label: Any, metadata: Mapping[str, Any]) -> Any:
    """Return the reward of one response by the rule ``kind`` (a key of RULES)."""
    return RULES[kind](response, label, metadata)


def prepare(kind: str, *_: Any) -> None:
    """Load what ``grade`` of these arguments loads once: no answer is charged for it."""
    if kind == "ifbench":
        load_checkers()
