"""``perf/memory/*``: what the phases of a rollout's training took, on the rank that took most."""

from __future__ import annotations

from argparse import Namespace

import torch

from slime.backends.megatron_utils.parallel import gather_from_world, is_main_rank
from slime.observability.logging_utils import log
from slime.observability.memory import CudaGauge, Gauge, HostGauge, PhasePeaks
from slime.observability.steps import rollout_step
from slime.observability.timer import get_timers

GIB = 2**30


def watch_memory(device: torch.device) -> PhasePeaks:
    """Measure every timed phase of this process from now on."""
    gauges: list[Gauge] = [HostGauge()]
    if device.type == "cuda":
        gauges.append(CudaGauge())
    peaks = PhasePeaks(gauges)
    get_timers().watch("memory", peaks)
    return peaks


def log_memory(
    args: Namespace, rollout_id: int, peaks: PhasePeaks, *, prefix: str = "", **copies: int
) -> dict[str, float]:
    """Log and return ``perf/memory/<prefix><name>`` in GiB: phases, and ``copies`` in bytes by name (collective).

    Each value is the highest of all ranks.
    """
    mine = {**peaks.drain(), **copies}
    everyone: list[dict[str, int]] = gather_from_world(mine)
    names = sorted({name for part in everyone for name in part})
    metrics = {f"perf/memory/{prefix}{name}": max(part.get(name, 0) for part in everyone) / GIB for name in names}
    if is_main_rank():
        log(args, {**metrics, "rollout/step": rollout_step(args, rollout_id)}, "rollout/step")
    return metrics
