"""What rollouts note about their requests, and what a stand-in for ``GenerateState`` need not have."""

from __future__ import annotations

import functools
from typing import Any

from slime.rollout.requests.generate_state import GroupsInFlight, PendingRewards, PromptTokens
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.rm_hub.late_failures import LateFailures


class Bookkeeping:
    """Which rollout and evaluation are made, their rewards, and their groups in flight."""

    def __init__(self, args: Any = None) -> None:
        self.rollout_id: int | None = None
        self.reward_errors = RewardErrors(args)
        self.eval_rollout_id: int | None = None
        self.eval_reward_errors = RewardErrors()
        self.pending_rewards = PendingRewards()
        self.late_failures = LateFailures()
        self.prompt_tokens = PromptTokens()
        self.groups_in_flight = GroupsInFlight()


@functools.cache
def _of_stand_ins() -> Bookkeeping:
    return Bookkeeping()


def bookkeeping_of(state: Any) -> Bookkeeping:
    """Return the notes of ``state``, which are its own attributes; all stand-ins of a process share theirs."""
    return state if isinstance(state, Bookkeeping) else _of_stand_ins()
