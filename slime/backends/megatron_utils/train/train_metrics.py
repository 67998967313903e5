"""Reports of a trainer on a rollout: metrics, memory, assertions of CI runs, and the dump of the train data."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Hashable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from slime.algorithms.trained_tokens import where_trained
from slime.arguments.args import Args
from slime.backends.megatron_utils.state.parallel import (
    all_gather_objects,
    context_parallel,
    data_parallel,
    gather_from_world,
    is_last_stage,
    is_main_rank,
    tensor_parallel,
)
from slime.backends.megatron_utils.train.cp_utils import ResponseLayout
from slime.backends.megatron_utils.train.data import RolloutData, num_samples, per_sample_columns, sample_index
from slime.models.flops import forward_flops
from slime.observability.logging_utils import log
from slime.observability.timer import drain_metrics, get_timers
from slime.observability.tracking import rollout_step
from slime.utils.atomic_file import replacing

_NOT_METRICS = {
    "tokens", "loss_masks", "sample_indices", "rollout_ids", "rollout_mask_sums", "rollout_turn_counts", "source_names",
    "prompt", "metadata", "round_number", "multimodal_train_inputs", "rollout_routed_experts",
    "rollout_top_p_token_ids", "rollout_top_p_token_offsets", "group_indices",
}  # fmt: skip


# Timers of work on all tokens -> how many forward passes it costs (a backward pass costs two).
FORWARD_PASSES = {
    "log_probs": 1, "ref_log_probs": 1, "teacher_log_probs": 1, "values": 1, "actor_train": 3, "critic_train": 3,
}  # fmt: skip


def rollout_means(args: Args, data: RolloutData) -> dict[str, float]:
    """Return the mean of every numeric per-sample column over all DP x CP ranks (collective on the last stage).

    Columns with a value per response token use the masked mean of the loss, over the trajectories that have a trained
    token. Of rewards every trajectory has one, the mean of its samples'. Other scalars, and tensors of any other length
    (columns of the user's own), have a plain mean.
    """
    layout = ResponseLayout.of(data)
    reduce_tokens = layout.reducer(data["loss_masks"], data.get("rollout_mask_sums"))
    masks = layout.local(data["loss_masks"])
    sizes = [mask.shape for mask in masks]
    device = data["loss_masks"][0].device
    weight = float(reduce_tokens(torch.ones(sum(size.numel() for size in sizes), device=device, dtype=torch.float64)))
    local: dict[str, tuple[float | None, float, int]] = {}  # reduced as in the loss, or None; plain sum; how many
    of_trajectories: dict[str, TrajectorySums] = {}
    first_of_cp = context_parallel().rank == 0
    for name, column in per_sample_columns(data).items():
        if name in _NOT_METRICS or column is None or not len(column):
            continue
        if all(torch.is_tensor(value) and value.dim() == 1 and value.is_floating_point() for value in column):
            values = torch.cat([value.to(device) for value in column])
            reduced = float(reduce_tokens(values)) if [value.shape for value in column] == sizes else None
            local[name] = (reduced, float(values.sum()), values.numel())
        elif all(isinstance(v, Real) or (torch.is_tensor(v) and v.dim() == 0) for v in column):
            name, numbers = name.removeprefix("local_"), [float(value) for value in column]
            if name in _REWARDS:
                of_trajectories[name] = _by_trajectory(data, numbers) if first_of_cp else {}
            else:
                local[name] = (None, math.fsum(numbers), num_samples(data)) if first_of_cp else (None, 0.0, 0)
    gathered = all_gather_objects((weight, local, of_trajectories))
    trained = math.fsum(part for part, _, _ in gathered) or 1.0
    means = {}
    for name in sorted({name for _, part, _ in gathered for name in part}):
        parts = [part[name] for _, part, _ in gathered if name in part]
        sums = [part[0] for part in parts if part[0] is not None]
        if len(sums) == len(parts):
            means[name] = math.fsum(sums) / trained
        else:
            means[name] = math.fsum(part[1] for part in parts) / max(sum(part[2] for part in parts), 1)
    for name in sorted({name for _, _, part in gathered for name in part}):
        means[name] = _mean_of_trajectories([part[name] for _, _, part in gathered if name in part])
    return means


_REWARDS = ("rewards", "raw_reward")
TrajectorySums = dict[Hashable, tuple[float, int]]


def _by_trajectory(data: RolloutData, values: Sequence[float]) -> TrajectorySums:
    """Return sum and number of the values of this rank's samples by trajectory."""
    alone = [(data_parallel().rank, position) for position in range(len(values))]
    found: TrajectorySums = {}
    for rollout_id, value in zip(data.get("rollout_ids") or alone, values, strict=True):
        total, count = found.get(rollout_id, (0.0, 0))
        found[rollout_id] = (total + value, count + 1)
    return found


def _mean_of_trajectories(parts: Sequence[TrajectorySums]) -> float:
    """Return the mean over trajectories of the mean over their samples, on any ranks."""
    sums: TrajectorySums = {}
    for rollout_id, (value, number) in (row for part in parts for row in part.items()):
        total, count = sums.get(rollout_id, (0.0, 0))
        sums[rollout_id] = (total + value, count + number)
    return math.fsum(total / count for total, count in sums.values()) / max(len(sums), 1)


def log_rollout_metrics(args: Args, rollout_id: int, data: RolloutData) -> dict[str, float]:
    """Log and return ``rollout/*`` of this rollout.

    Collective over DP x CP on the last stage; the others return {}.
    """
    if not is_last_stage():
        return {}
    metrics = train_data_metrics(args, data)
    if is_main_rank():
        log(args, {**metrics, "rollout/step": rollout_step(args, rollout_id)}, "rollout/step")
    return metrics


def train_data_metrics(args: Args, data: RolloutData) -> dict[str, float]:
    """Return ``rollout/*`` of the columns that are trained on (collective over DP x CP on the last stage)."""
    means = {**rollout_means(args, data), **correct_sample_means(args, data, all_gather_objects)}
    return {f"rollout/{name}": value for name, value in means.items()}


def log_train_metrics(args: Args, rollout_id: int, steps: list[dict[str, float]], prefix: str = "") -> None:
    """Log ``train/<prefix>*`` of every optimizer step at its place on the axis ``train/step``."""
    if not is_main_rank():
        return
    for step_id, metrics in enumerate(steps):
        named = {f"train/{prefix}{name}": value for name, value in metrics.items()}
        log(args, {**named, "train/step": train_step(args, rollout_id, step_id, len(steps))}, "train/step")


def train_step(args: Args, rollout_id: int, step_id: int, num_steps: int) -> int:
    """Return the place of an optimizer step on the ``train/step`` axis.

    The number of steps differs between rollouts where samples are carried over to the next one, so each rollout has
    room for the most that the flags let it make, ``ceil(samples of a rollout / global batch size)``: places are not
    used twice and do not depend on where a run was resumed. Rollouts that make fewer steps leave gaps; a rollout
    function that makes more samples than the flags say may use places of the next rollout.
    """
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    return rollout_id * max(num_steps, -(-samples // args.global_batch_size)) + step_id


def log_perf(
    args: Args, rollout_id: int, shard_lengths: list[int], prefix: str = "", *, of_towers: float = 0.0
) -> dict[str, float]:
    """Log and return ``perf/<prefix>*``: seconds by timer, tokens and TFLOP/s per device, share of time waited.

    ``shard_lengths`` are the total lengths of this DP rank's samples, ``of_towers`` the FLOPs of a forward pass of the
    vision tower over their images. Collective over DP x CP on the last stage.
    """
    before = f"perf/{prefix}"
    metrics = drain_metrics(before)
    if not is_last_stage():
        return metrics
    parts = all_gather_objects((shard_lengths, of_towers) if context_parallel().rank == 0 else ([], 0.0))
    lengths = [length for part, _ in parts for length in part]
    of_towers = sum(flops for _, flops in parts)
    tera = dist.get_world_size() * 1e12
    for name, passes in FORWARD_PASSES.items():
        if seconds := metrics.get(f"{before}{name}_time"):
            with_mtp = args.enable_mtp_training and name == "actor_train"  # other passes leave the MTP layers out
            flops = passes * forward_flops(args, lengths, mtp=with_mtp)
            flops += (passes if args.train_vision_tower else 1) * of_towers  # a frozen one has no backward pass
            metrics[f"{before}{name}_tflops"] = flops / tera / seconds
    for name in ("actor_train", "critic_train"):
        if seconds := metrics.get(f"{before}{name}_time"):
            metrics[f"{before}{name}_tok_per_s"] = sum(lengths) / seconds
    trained, waited = metrics.get(f"{before}train_time"), metrics.get(f"{before}train_wait_time")
    if trained is not None and waited is not None:
        metrics[f"{before}step_time"] = trained + waited
        metrics[f"{before}wait_time_ratio"] = waited / max(trained + waited, 1e-9)
    if is_main_rank():
        log(args, {**metrics, "rollout/step": rollout_step(args, rollout_id)}, "rollout/step")
    return metrics


_QUARTERS = ("p25", "p50", "p75", "p100")


def correct_sample_means(args: Args, data: RolloutData, all_gather: Callable[[Any], list[Any]]) -> dict[str, float]:
    """Return means over the samples whose raw reward is 1, of all ranks; {} without the flag or such a sample.

    ``correct_response_lengths``; ``correct_length/p25`` to ``/p100``: the share of them whose response fills up to a
    quarter, half, ... of ``--rollout-max-response-len``, each quarter for itself; ``correct_entropy``: mean of minus
    the log-prob over the trained tokens of samples that have any, an estimate of the entropy, from the trainer's
    log-probs or else the engine's.
    ``all_gather`` collects over DP x CP.
    """
    raw = data.get("local_raw_reward")
    if not args.log_correct_samples or raw is None:
        return {}
    correct = [i for i, reward in enumerate(raw) if isinstance(reward, Real) and reward == 1]
    local = {"correct_entropy": _surprise(data, correct)} if _log_probs(data) is not None else {}
    if context_parallel().rank == 0:
        lengths = [int(data["response_lengths"][i]) for i in correct]
        local["count"] = float(len(correct))
        local["trained"] = float(sum(bool(data["loss_masks"][i].any()) for i in correct))
        local["correct_response_lengths"] = float(sum(lengths))
        local.update(_quarters(args.rollout_max_response_len, lengths))
    parts = all_gather(local)
    sums = {name: math.fsum(part.get(name, 0.0) for part in parts) for part in parts for name in part}
    count = sums.pop("count", 0.0)
    counts = {"correct_entropy": sums.pop("trained", 0.0) or 1.0}
    if not count:
        return {}
    return {name: value / counts.get(name, count) for name, value in sums.items()}


def _log_probs(data: RolloutData) -> Sequence[torch.Tensor] | None:
    found = data.get("log_probs")
    return data.get("rollout_log_probs") if found is None else found


def _surprise(data: RolloutData, correct: list[int]) -> float:
    """Sum over samples of this rank's part of the mean of -log p over trained tokens."""
    log_probs, total = _log_probs(data), 0.0
    assert log_probs is not None
    local = ResponseLayout.of(data).local(data["loss_masks"])
    for i in correct:
        total -= float(where_trained(local[i], log_probs[i]).sum() / data["loss_masks"][i].sum().clamp_min(1))
    return total


def _quarters(longest: int | None, lengths: list[int]) -> dict[str, float]:
    if not longest:
        return {}
    counts = dict.fromkeys(_QUARTERS, 0.0)
    for length in lengths:
        counts[_QUARTERS[min(max(math.ceil(4 * length / longest) - 1, 0), 3)]] += 1
    return {f"correct_length/{name}": count for name, count in counts.items()}


GIB = 2**30


def watch_memory(device: torch.device) -> PhasePeaks:
    """Measure every timed phase of this process from now on."""
    gauges: list[Gauge] = [HostGauge()]
    if device.type == "cuda":
        gauges.append(CudaGauge())
    peaks = PhasePeaks(gauges)
    get_timers().watch("memory", peaks)
    return peaks


def log_memory(args: Args, rollout_id: int, peaks: PhasePeaks, *, prefix: str = "", **copies: int) -> dict[str, float]:
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


_GRAD_NORM_TOLERANCE = 0.01


def check_rollout(args: Args, rollout_id: int, metrics: dict[str, float]) -> None:
    """Check means over the rollout: log-probs in (-1, 0), entropy in (0, 1), reference equal to actor at rollout 0.

    Raises AssertionError. No-op without ``--ci-test``, and off the last pipeline stage, where there are no metrics.
    """
    if not args.ci_test or not metrics:
        return
    log_probs, ref = metrics.get("rollout/log_probs"), metrics.get("rollout/ref_log_probs")
    if rollout_id == 0 and log_probs is not None and ref is not None and _kl_checks(args):
        assert abs(log_probs - ref) < 1e-8, f"actor and reference differ before training: {log_probs} and {ref}"
    if log_probs is not None:
        assert -1 < log_probs < 0, f"mean log-prob {log_probs} is outside of (-1, 0)"
    entropy = metrics.get("rollout/entropy")
    if entropy is not None:
        assert 0 < entropy < 1, f"mean entropy {entropy} is outside of (0, 1)"


def check_steps(args: Args, rollout_id: int, steps: list[dict[str, float]], role: str = "actor") -> None:
    """Check the optimizer steps' metrics and compare or record gradient norms. Raises AssertionError."""
    for step_id, metrics in enumerate(steps):
        if args.ci_test:
            _check_step(args, rollout_id, step_id, metrics)
        _compare_grad_norm(args, role, rollout_id, step_id, metrics["grad_norm"])


def _check_step(args: Args, rollout_id: int, step_id: int, metrics: dict[str, float]) -> None:
    where = f"rollout {rollout_id}, step {step_id}"
    threshold = args.ci_train_rollout_logprob_abs_diff_threshold
    difference = metrics.get("train_rollout_logprob_abs_diff")
    if difference is not None:
        assert difference <= threshold, (
            f"{where}: trainer and engine log-probs differ by {difference} on average; "
            f"--ci-train-rollout-logprob-abs-diff-threshold is {threshold}"
        )
    mtp_loss = metrics.get("mtp_loss")
    if mtp_loss is not None:
        assert 0 < mtp_loss < 1, f"{where}: the loss of MTP layers is {mtp_loss}, not in (0, 1)"
    if args.ci_disable_kl_checker:
        return
    other_policy = args.use_rollout_logprobs or args.keep_old_actor
    if step_id == 0 and "ppo_kl" in metrics and "pg_clipfrac" in metrics and not other_policy:
        assert abs(metrics["ppo_kl"]) < 1e-8, (
            f"{where}: the policy is not the old policy yet, ppo_kl {metrics['ppo_kl']}"
        )
    if rollout_id == 0 and step_id == 0 and "kl_loss" in metrics and _kl_checks(args):
        assert abs(metrics["kl_loss"]) < 1e-8, (
            f"{where}: the policy is the reference, but kl_loss is {metrics['kl_loss']}"
        )


def _kl_checks(args: Args) -> bool:
    return not args.ci_disable_kl_checker and not args.use_rollout_routing_replay


def _compare_grad_norm(args: Args, role: str, rollout_id: int, step_id: int, grad_norm: float) -> None:
    fields = {"role": role, "rollout_id": rollout_id, "step_id": step_id}
    if (template := args.ci_save_grad_norm) and is_main_rank():
        path = Path(template.format(**fields))
        with replacing(path) as temporary:
            torch.save(grad_norm, temporary)
    if template := args.ci_load_grad_norm:
        expected = float(torch.load(template.format(**fields), weights_only=True))
        assert math.isclose(grad_norm, expected, rel_tol=_GRAD_NORM_TOLERANCE, abs_tol=_GRAD_NORM_TOLERANCE), (
            f"rollout {rollout_id}, step {step_id}: gradient norm {grad_norm}, --ci-load-grad-norm has {expected}"
        )


logger = logging.getLogger(__name__)


# Columns with one value per response token, kept in the CP-local layout during training.
_CP_LOCAL = (
    "log_probs", "ref_log_probs", "teacher_log_probs", "rollout_log_probs", "entropy", "ref_entropy", "teacher_entropy",
    "values", "kl", "advantages", "returns", "opd_reverse_kl",
)  # fmt: skip


_SHARD_KEYS = ("sample_indices", "partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")


def save_train_dump(args: Args, rollout_id: int, data: RolloutData) -> None:
    """Write format version 2 to the path template ``args.save_debug_train_data`` (fields rollout_id, rank).

    Collective over DP x CP on the last pipeline stage; the file is written by its first rank.
    """
    template = args.save_debug_train_data
    if not template or not is_last_stage():
        return
    columns = {name: _full_length(data, name, column) for name, column in per_sample_columns(data).items()}
    if tensor_parallel().rank != 0 or context_parallel().rank != 0:
        return
    dp = data_parallel()
    part = _local_part(data, columns, dp.rank)
    parts = all_gather_objects(part, dp)
    if not is_main_rank():
        return
    samples = [sample for samples, _ in parts for sample in samples]
    path = Path(template.format(rollout_id=rollout_id, rank=dist.get_rank()))
    dump = {
        "format_version": 2,
        "rollout_id": rollout_id,
        "rank": dist.get_rank(),
        "samples": _in_rollout_order(samples),
        "dp_shards": [shard for _, shard in parts],
        "raw_reward": _to_host(data.get("raw_reward")),
    }
    with replacing(path) as temporary:
        torch.save(dump, temporary)
    logger.info("saved train data of rollout %d to %s (%d samples)", rollout_id, path, len(samples))


def _full_length(data: RolloutData, name: str, column: Sequence[Any]) -> list[Any]:
    if name in _CP_LOCAL:
        column = ResponseLayout.of(data).whole(column)
    return [_to_host(value) for value in column]


def _local_part(data: RolloutData, columns: dict[str, list[Any]], dp_rank: int) -> tuple[list[dict], dict[str, Any]]:
    partition = data.get("partition")
    samples = []
    for i in range(num_samples(data)):
        sample: dict[str, Any] = {
            "data_parallel_rank": dp_rank,
            "sample_index": sample_index(data, i),
            "rollout_position": None if partition is None else int(partition[i]),
        }
        sample.update({name: column[i] for name, column in columns.items() if name != "sample_indices"})
        samples.append(sample)
    shard = {"rank": dist.get_rank(), "data_parallel_rank": dp_rank}
    shard.update({name: _to_host(data.get(name)) for name in _SHARD_KEYS})
    rest = {k: _to_host(v) for k, v in data.items() if k not in columns and k not in shard and k != "raw_reward"}
    return samples, {**shard, **rest}


def _in_rollout_order(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for key in ("rollout_position", "sample_index"):
        if all(sample[key] is not None for sample in samples):
            return sorted(samples, key=lambda sample: sample[key])
    logger.warning("train dump: samples have neither positions nor indices; they are in the order of the ranks")
    return samples


def _to_host(value: object) -> Any:
    if isinstance(value, dict):
        return {name: _to_host(item) for name, item in value.items()}
    return value.detach().cpu().clone() if torch.is_tensor(value) else value


Bytes = dict[str, int]


class Gauge(Protocol):
    """Measures one kind of memory since the last ``reset``."""

    def reset(self) -> None: ...
    def peaks(self) -> Bytes: ...
    def now(self) -> Bytes: ...


class HostGauge:
    """Resident memory of this process. Where the kernel does not let its peak be reset, the peak is that of the run."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc

    def reset(self) -> None:
        with contextlib.suppress(OSError):
            (self._proc / "clear_refs").write_text("5")

    def peaks(self) -> Bytes:
        """Return ``{"rss": bytes}``; nothing where there is no /proc."""
        return self._read("VmHWM")

    def now(self) -> Bytes:
        return self._read("VmRSS")

    def _read(self, field: str) -> Bytes:
        try:
            lines = (self._proc / "status").read_text().splitlines()
        except OSError:
            return {}
        found = [line.split() for line in lines if line.startswith(f"{field}:")]
        return {"rss": int(found[0][1]) * 1024} if found else {}


class CudaGauge:
    """Memory that torch has allocated on the current device, and memory that it has reserved for that."""

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> Bytes:
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}

    def now(self) -> Bytes:
        return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}


class PhasePeaks:
    """Watches the timers of a process: the peak of each phase, those inside of it included.

    A phase that is timed again before ``drain`` counts with its highest peak.
    """

    def __init__(self, gauges: list[Gauge]) -> None:
        self._gauges = gauges
        self._running: list[tuple[str, Bytes]] = []
        self._peaks: dict[str, Bytes] = {}

    def began(self, name: str) -> None:
        """A timer begins: what was seen up to here belongs to the phases around it."""
        if self._running:
            _raise_to(self._running[-1][1], self._read(lambda gauge: gauge.peaks()))
        for gauge in self._gauges:
            gauge.reset()
        self._running.append((name, {}))

    def ended(self, name: str) -> None:
        """The timer that began last ends."""
        _, peak = self._running.pop()
        _raise_to(peak, self._read(lambda gauge: gauge.peaks()))
        for gauge in self._gauges:
            gauge.reset()
        _raise_to(self._peaks.setdefault(name, {}), peak)
        if self._running:
            _raise_to(self._running[-1][1], peak)

    def drain(self) -> Bytes:
        """Return bytes as ``<kind>`` (now) and ``<phase>_peak_<kind>`` since the last call."""
        found = self._read(lambda gauge: gauge.now())
        for name, peak in self._peaks.items():
            found.update({f"{name}_peak_{kind}": value for kind, value in peak.items()})
        self._peaks = {}
        return found

    def _read(self, read: Callable[[Gauge], Bytes]) -> Bytes:
        return {kind: value for gauge in self._gauges for kind, value in read(gauge).items()}


def _raise_to(peak: Bytes, seen: Bytes) -> None:
    for kind, value in seen.items():
        peak[kind] = max(value, peak.get(kind, 0))
