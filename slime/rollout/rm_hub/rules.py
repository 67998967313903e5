"""The built-in rewards that are rules, as one plain function: what worker processes compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.ifbench import compute_ifbench_reward, load_checkers
from slime.rollout.rm_hub.math_dapo_utils import ANSWER_PATTERN, compute_score
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.rollout.rm_hub.math_verify_rule import compute_math_verify_reward, load_math_verify


def _math(response: str, label: Any, metadata: Mapping[str, Any]) -> int:
    return int(grade_answer_verl(response, label))


def _deepscaler(response: str, label: Any, metadata: Mapping[str, Any]) -> int:
    return get_deepscaler_rule_based_reward(response, label)


def _dapo(response: str, label: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return compute_score(response, label)


def _f1(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    return f1_score(response, label)[0]


def _math_verify(response: str, label: Any, metadata: Mapping[str, Any]) -> int:
    return compute_math_verify_reward(response, label)


RULES: dict[str, Callable[[str, Any, Mapping[str, Any]], Any]] = {
    "math": _math,
    "math_verify": _math_verify,
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
WRONG: dict[str, Any] = {
    "math": 0, "math_verify": 0, "deepscaler": 0, "dapo": {"score": -1.0, "acc": False, "pred": "[LIMIT]"}, "f1": 0.0,
    "gpqa": 0.0,
}  # fmt: skip
"""What an answer gets that makes its rule exceed a limit. The checkers of ``ifbench`` are not ours: none there."""
_BOX, _LINE = ("math", "math_verify", "deepscaler"), ("dapo",)


def grade(kind: str, response: str, label: Any, metadata: Mapping[str, Any]) -> Any:
    """Return the reward of one response by the rule ``kind`` (a key of RULES)."""
    return RULES[kind](response, label, metadata)


def as_response(kind: str, answer: str) -> str:
    """Return a response in which the rule ``kind`` finds just ``answer``, which was taken out of a box."""
    if kind in _BOX and answer:
        return f"</think>\\boxed{{{answer}}}"
    if kind in _LINE and answer and not re.search(ANSWER_PATTERN, answer):
        return f"Answer: {' '.join(answer.split())}"
    return answer


def prepare(kind: str, *_: Any) -> None:
    """Load what ``grade`` of these arguments loads once: no answer is charged for it."""
    if kind == "ifbench":
        load_checkers()
    if kind == "math_verify":
        load_math_verify()
