"""Old path of ``slime.rollout.sglang_rollout``, which is where names have to be patched to have an effect."""

from __future__ import annotations

from slime.utils.moved import moved

_HOMES = {
    "GenerateState": "slime.rollout.sglang_rollout.GenerateState",
    "abort": "slime.rollout.sglang_rollout.abort",
    "eval_rollout": "slime.rollout.sglang_rollout.eval_rollout",
    "generate": "slime.rollout.sglang_rollout.generate",
    "generate_and_rm": "slime.rollout.sglang_rollout.generate_and_rm",
    "generate_and_rm_group": "slime.rollout.sglang_rollout.generate_and_rm_group",
    "generate_rollout": "slime.rollout.sglang_rollout.generate_rollout",
    "generate_rollout_async": "slime.rollout.sglang_rollout.generate_rollout_async",
}
__all__ = list(_HOMES)
__getattr__ = moved(__name__, _HOMES)
