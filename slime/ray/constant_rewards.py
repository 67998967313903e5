"""Noticing a reward that is the same for every sample: nothing can be learned from it, and no metric looks wrong."""

from __future__ import annotations

import logging
import numbers
from argparse import Namespace
from collections.abc import Mapping, Sequence

from slime.utils.types import Sample

logger = logging.getLogger(__name__)

ROLLOUTS = 3
"""So many rollouts in a row with one and the same reward are no chance."""


class ConstantRewards:
    """Watches the rewards of rollouts, and warns once. Where something else than the reward may teach, it does not."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self._value: float | None = None
        self._in_a_row = self._samples = 0
        other_loss = args.use_opd or args.loss_type != "policy_loss"
        own = args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path
        self._watches = not other_loss and not own

    def look(self, rollout_id: int, samples: Sequence[Sample]) -> None:
        """Look at the rewards of a rollout, those of samples that are left out of the loss excepted."""
        if not self._watches:
            return
        key = self.args.reward_key
        rewards = [sample.reward for sample in samples if not sample.remove_sample]
        if key:
            rewards = [reward.get(key) if isinstance(reward, Mapping) else None for reward in rewards]
        found = {float(reward) if isinstance(reward, numbers.Real) else None for reward in rewards}
        value = found.pop() if len(found) == 1 else None
        if value is None or value != self._value:
            self._in_a_row = self._samples = 0
        self._value = value
        if value is None:
            return
        self._in_a_row += 1
        self._samples += len(rewards)
        if self._in_a_row == ROLLOUTS:
            self._watches = False
            logger.warning(
                "the reward of all %d samples of rollouts %d to %d is %g: from equal rewards nothing is learned. Look "
                "at responses and labels in %s/samples, and at the reward (%s)",
                self._samples, rollout_id - ROLLOUTS + 1, rollout_id, value, self.args.run_dir, _reward(self.args),
            )  # fmt: skip


def _reward(args: Namespace) -> str:
    if path := args.custom_rm_path:
        return f"--custom-rm-path {path}"
    kind = args.rm_type
    return f"--rm-type {kind}" if kind else 'metadata["rm_type"]'
