"""One rank of PPO's critic: a trainer whose model says what a state is worth."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

import torch

from slime.backends.megatron_utils.checkpoint import TrainerState, load_checkpoint
from slime.backends.megatron_utils.checkpoint_dir import find_checkpoint
from slime.backends.megatron_utils.data import RolloutData
from slime.backends.megatron_utils.loss import compute_advantages_and_returns
from slime.backends.megatron_utils.passes import forward_only
from slime.backends.megatron_utils.reporting import log_rollout_metrics
from slime.backends.megatron_utils.trainer import MegatronTrainer
from slime.backends.megatron_utils.values import VALUE_HEAD, checkpoint_has_value_head, get_values
from slime.observability.timer import timer

logger = logging.getLogger(__name__)

CRITIC = "critic"


class CriticTrainer(MegatronTrainer):
    """Estimates values with the weights of before, learns the returns, and hands the values to the actor.

    The model is the actor's with a value head for an output layer; it starts from the same weights, the head afresh.
    ``args`` are those of the role (``slime.arguments.rules.roles``), whose ``loss_type`` is ``value_loss``.
    """

    role = CRITIC
    metric_prefix = "critic-"

    def __init__(self, args: Namespace, role: str = CRITIC, with_ref: bool = False) -> None:
        if with_ref:
            raise ValueError("the critic has no reference model: its rewards are without the KL penalty")
        super().__init__(args, role=role)

    def _build_model(self) -> list[torch.nn.Module]:
        from slime.backends.megatron_utils.model_provider import get_model

        return get_model(self.args, with_value_head=True)

    def _load_megatron(self, root: str, step: int | None) -> int | None:
        directory, _ = find_checkpoint(root, step)
        if checkpoint_has_value_head(directory, self.args.hidden_size):
            return super()._load_megatron(root, step)
        logger.warning("%s has no value head of this size: it starts afresh, the other weights are read", directory)
        state = TrainerState(self.model, adapters=self._state.adapters)
        load_checkpoint(self.args, root, state, step=step, weights_only=True, without=VALUE_HEAD)
        self.optimizer.reload_model_params()
        return None

    def _load_hf(self, path: str) -> None:
        super()._load_hf(path)
        logger.info("the critic's value head starts with fresh weights")

    def _before_steps(self, rollout_id: int, data: RolloutData, external_data: dict[str, Any]) -> dict[str, float]:
        del external_data  # the critic is the first to see a rollout
        with timer("values"):
            data.update(forward_only(self.args, self.model, data, get_values, self.hooks))
        compute_advantages_and_returns(self.args, data)
        if rollout_id >= self.args.num_critic_only_steps:
            return {}
        return log_rollout_metrics(self.args, rollout_id, data)  # otherwise the actor's, who has more to say

    def _after_steps(self, rollout_id: int, data: RolloutData) -> None:
        """Nothing: the dump of train data and the reference are the actor's."""

    def _report(
        self, data: RolloutData, steps: list[dict[str, float]], rollout_metrics: dict[str, float]
    ) -> dict[str, Any]:
        """Return {"values": one CPU tensor [n_local] per sample} on the last pipeline stage, {} on the others."""
        del steps, rollout_metrics  # they are logged
        if "values" not in data:
            return {}
        # A view of the whole column would be sent with all of it.
        return {"values": [value.to("cpu", copy=True) for value in data["values"]]}
