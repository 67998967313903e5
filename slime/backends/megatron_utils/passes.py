"""The forward passes before the steps of a rollout: what reference, teacher and old policy say of its tokens."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from slime.backends.megatron_utils.data import RolloutData
from slime.backends.megatron_utils.hooks import TrainerHooks
from slime.backends.megatron_utils.log_prob_pass import forward_only, old_log_probs_equal_current
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
from slime.backends.megatron_utils.old_actor import OLD_ACTOR
from slime.backends.megatron_utils.response_logits import TOP_P_COLUMNS
from slime.backends.megatron_utils.routing_replay import RoutingReplay
from slime.backends.megatron_utils.teacher import TEACHER, has_teacher
from slime.backends.megatron_utils.weight_backup import WeightBackup
from slime.observability.timer import timer

ACTOR, REFERENCE = "actor", "ref"
logger = logging.getLogger(__name__)


def drop_precomputed_logprobs(data: RolloutData) -> None:
    """Remove columns that came with the samples under the names of the passes' own.

    Where the pass for ``log_probs`` is left out, such a column would be taken for the old policy.
    """
    names = ("log_probs", "entropy", "ref_log_probs", "ref_entropy")
    if given := [name for name in names if data.pop(name, None) is not None]:
        logger.warning("left out of the train data: %s; the trainer computes what has these names", ", ".join(given))


class LogProbPasses:
    """Adds the columns that come from forward passes with the weights of ``backup``'s tags, as far as they are needed.

    Every method is collective; the columns appear on the last pipeline stage.
    """

    def __init__(
        self,
        args: Namespace,
        model: Sequence[torch.nn.Module],
        backup: WeightBackup,
        hooks: TrainerHooks,
        *,
        with_ref: bool,
        routing: RoutingReplay,
    ) -> None:
        self.args, self.model, self.hooks, self._routing = args, model, hooks, routing
        self._backup = backup
        self._others = {REFERENCE: "ref_"} if with_ref else {}
        if has_teacher(args):
            self._others[TEACHER] = "teacher_"
        self._old_policy = OLD_ACTOR if args.keep_old_actor else ACTOR

    def add_to(self, data: RolloutData) -> None:
        """Add ``ref_log_probs``, ``teacher_log_probs`` and ``log_probs`` (and entropies when asked for) as needed.

        The weights of the actor are in the model again afterwards, unchanged to the bit, also after an error.
        """
        drop_precomputed_logprobs(data)
        passes = dict(self._others)
        if self._needs_old_policy(data):
            passes[self._old_policy] = ""
        if any(tag != ACTOR for tag in passes):
            self._backup.save(ACTOR)
        try:
            for tag, prefix in passes.items():
                with timer(f"{prefix}log_probs"):
                    self._backup.activate(tag)
                    with self._routing.old_policy() if tag == self._old_policy else nullcontext():
                        data.update(self._forward_only(data, prefix))
        finally:
            self._backup.activate(ACTOR)

    def _needs_old_policy(self, data: RolloutData) -> bool:
        args = self.args
        records_routing = args.use_routing_replay and not args.use_rollout_routing_replay
        if args.use_rollout_entropy or records_routing:
            return True
        mismatch = args.get_mismatch_metrics
        if args.use_rollout_logprobs and not mismatch:
            return False  # the engines' log-probs are the old ones
        return not old_log_probs_equal_current(args, data)

    def _forward_only(self, data: RolloutData, prefix: str) -> dict[str, list[torch.Tensor]]:
        def collect(*inputs: Any, **keywords: Any) -> Any:
            with_entropy = self.args.use_rollout_entropy
            return get_log_probs_and_entropy(*inputs, with_entropy=with_entropy, **keywords)

        return forward_only(
            self.args,
            self.model,
            data,
            collect,
            self.hooks,
            store_prefix=prefix,
            routing=self._routing,
            columns=TOP_P_COLUMNS,
        )
