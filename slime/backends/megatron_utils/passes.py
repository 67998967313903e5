"""The forward passes before the steps of a rollout: what reference and old policy say of its tokens."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from slime.backends.megatron_utils.data import RolloutData
from slime.backends.megatron_utils.hooks import TrainerHooks
from slime.backends.megatron_utils.log_prob_pass import forward_only, old_log_probs_equal_current
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
from slime.backends.megatron_utils.weight_backup import WeightBackup
from slime.observability.timer import timer

ACTOR, REFERENCE = "actor", "ref"


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
    ) -> None:
        self.args, self.model, self.hooks, self.with_ref = args, model, hooks, with_ref
        self._backup = backup

    def add_to(self, data: RolloutData) -> None:
        """Add ``ref_log_probs`` and ``log_probs`` (and ``entropy`` when asked for) as far as they are needed."""
        if self.with_ref:
            with timer("ref_log_probs"), self._weights_of(REFERENCE):
                data.update(self._forward_only(data, prefix="ref_"))
        mismatch = getattr(self.args, "get_mismatch_metrics", False)
        engine_policy = getattr(self.args, "use_rollout_logprobs", False) and not mismatch
        for_entropy = getattr(self.args, "use_rollout_entropy", False)
        if for_entropy or not (engine_policy or old_log_probs_equal_current(self.args, data)):
            with timer("log_probs"):
                data.update(self._forward_only(data, prefix=""))

    def _forward_only(self, data: RolloutData, prefix: str) -> dict[str, list[torch.Tensor]]:
        def collect(*inputs: Any, **keywords: Any) -> Any:
            with_entropy = bool(getattr(self.args, "use_rollout_entropy", False))
            return get_log_probs_and_entropy(*inputs, with_entropy=with_entropy, **keywords)

        return forward_only(self.args, self.model, data, collect, self.hooks, store_prefix=prefix)

    @contextmanager
    def _weights_of(self, tag: str) -> Iterator[None]:
        """Swap the weights ``tag`` into the model for the body, then the actor's back, unchanged to the bit."""
        self._backup.save(ACTOR)
        self._backup.activate(tag)
        try:
            yield
        finally:
            self._backup.activate(ACTOR)
