"""The mismatch meter: how far trainer and engine are apart on the same tokens, on every step, with an alarm.

It needs no flag: wherever samples have the engine's log-probs they are compared with the trainer's, those of the pass
before the step or, where that pass is left out, those of the step itself.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms.mismatch import combine, mismatch_sums_by_sample
from slime.arguments.args import Args
from slime.backends.megatron_utils.state.parallel import (
    all_gather_objects,
    data_parallel,
    first_error,
    is_last_stage,
    is_main_rank,
)
from slime.backends.megatron_utils.train.cp_utils import ResponseLayout
from slime.backends.megatron_utils.train.data import LossBatch, RolloutData, sample_name
from slime.batching.ragged_tensor import flat

logger = logging.getLogger(__name__)


class MismatchError(RuntimeError):
    """Trainer and engine are further apart than ``--mismatch-stop-threshold``; the parameters were not updated."""


def note_mismatch(batch: dict[str, Any]) -> torch.Tensor | None:
    """Return ``mismatch_sums`` [samples, 5] of a micro-batch's local tokens, None without both kinds of log-probs.

    The trainer's are those that the policy loss set in the ``LossBatch``, or the column ``log_probs``.
    """
    trainer = (batch.trainer_log_probs if isinstance(batch, LossBatch) else None) or batch.get("log_probs")
    rollout = batch.get("rollout_log_probs")
    if trainer is None or rollout is None:
        return None
    masks = ResponseLayout.of(batch).local(batch["loss_masks"])
    return mismatch_sums_by_sample(flat(trainer), flat(rollout), masks.values, masks.lengths)


class MismatchMeter:
    """Of one rollout: measures every step before it changes anything, and warns once."""

    def __init__(self, args: Args, rollout_id: int, data: RolloutData, device: torch.device) -> None:
        self._data, self._device, self._rollout_id = data, device, rollout_id
        self._alarm = args.mismatch_alarm_threshold
        self._stop = args.mismatch_stop_threshold
        self._warned = False

    def measure(self, step_id: int, micro_batches: list[list[int]], reports: list[dict[str, Any]]) -> dict[str, float]:
        """Return ``mismatch/{mean,max,kl_k1,kl_k3}`` over the step's trained tokens; {} off the last pipeline stage.

        ``reports`` are those of ``loss_function``, one per micro-batch. Collective over DP x CP on the last stage, and
        over all ranks with ``--mismatch-stop-threshold``. Raises ``MismatchError`` on all ranks alike.
        """
        if self._data.get("rollout_log_probs") is None:
            return {}
        metrics: dict[str, float] = {}
        message = None
        if is_last_stage():
            sums = [row for report in reports if report["mismatch"] is not None for row in report["mismatch"]]
            metrics = self._over_ranks(sums)
            mean = metrics.get("mismatch/mean", 0.0)
            # Without log-probs of before the first step, later steps see what the ones before them have learned.
            same_weights = step_id == 0 or self._data.get("log_probs") is not None
            stops = same_weights and self._stop is not None and mean > self._stop
            warns = same_weights and 0 < self._alarm < mean and not self._warned
            if stops or warns:
                self._warned = True
                flag, limit = ("stop", self._stop) if stops else ("alarm", self._alarm)
                message = self._message(step_id, metrics, f"--mismatch-{flag}-threshold {limit:g}", micro_batches, sums)
                if not stops and is_main_rank():
                    logger.warning("%s", message)
            message = message if stops else None
        if self._stop is not None and (error := first_error(message)):
            raise MismatchError(f"{error}. The parameters were not changed")
        return metrics

    def _over_ranks(self, sums: list[torch.Tensor]) -> dict[str, float]:
        own = combine(torch.stack(sums)) if sums else torch.zeros(5, dtype=torch.float64)
        own = own.to(self._device)
        ranks = data_parallel(with_context_parallel=True)
        parts = [own]
        if ranks.size > 1:
            parts = [torch.empty_like(own) for _ in range(ranks.size)]
            dist.all_gather(parts, own, group=ranks.group)
        distance, k1, k3, count, largest = combine(torch.stack(parts)).tolist()
        if count == 0:
            return {}
        return {
            "mismatch/mean": distance / count,
            "mismatch/max": largest,
            "mismatch/kl_k1": k1 / count,
            "mismatch/kl_k3": k3 / count,
        }

    def _message(
        self,
        step_id: int,
        metrics: dict[str, float],
        limit: str,
        micro_batches: list[list[int]],
        sums: list[torch.Tensor],
    ) -> str:
        """Say what was measured and which sample is worst (collective over DP x CP)."""
        positions = [position for indices in micro_batches for position in indices]
        rows = torch.stack(sums).tolist() if sums else []
        own = [(sample_name(self._data, position), *row) for position, row in zip(positions, rows, strict=True)]
        parts = all_gather_objects(own)
        samples: dict[str, list[float]] = {}  # context-parallel ranks each have a part of a sample
        for name, distance, _, _, count, largest in (row for part in parts for row in part):
            found = samples.setdefault(name, [0.0, 0.0, 0.0])
            samples[name] = [found[0] + distance, found[1] + count, max(found[2], largest)]
        worst = max(samples, key=lambda name: samples[name][0] / max(samples[name][1], 1))
        total, trained, largest = samples[worst]
        return (
            f"rollout {self._rollout_id}, optimizer step {step_id}: log-probs of trainer and engine for the same "
            f"tokens differ by {metrics['mismatch/mean']:.4g} on average (at most {metrics['mismatch/max']:.4g}, KL "
            f"{metrics['mismatch/kl_k3']:.4g}), {limit}. Worst is {worst}: {total / max(trained, 1):.4g} on average "
            f"over {trained:.0f} trained tokens, at most {largest:.4g}. Look for weights that did not reach the "
            "engines, other sampling parameters, tokens that were encoded again, and other precisions or expert "
            "routing in the engine; small differences are what --use-tis corrects"
        )
