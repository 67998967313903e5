"""What a trainer reports: means over the rollout's columns, metrics of the optimiser steps, times and throughput."""

from __future__ import annotations

import math
from argparse import Namespace
from numbers import Real

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.correct_samples import correct_sample_means
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean, slice_log_prob_with_cp
from slime.backends.megatron_utils.data import RolloutData, num_samples, per_sample_columns
from slime.backends.megatron_utils.parallel import all_gather_objects, context_parallel, is_last_stage, is_main_rank
from slime.batching.flops import forward_flops
from slime.observability.logging_utils import log
from slime.observability.steps import rollout_step
from slime.observability.timer import drain_metrics

_NOT_METRICS = {
    "tokens", "loss_masks", "sample_indices", "rollout_ids", "rollout_mask_sums", "source_names", "prompt", "metadata",
    "round_number", "multimodal_train_inputs", "rollout_routed_experts", "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets", "group_indices",
}  # fmt: skip

# Timers of work on all tokens -> how many forward passes it costs (a backward pass costs two).
FORWARD_PASSES = {
    "log_probs": 1, "ref_log_probs": 1, "teacher_log_probs": 1, "values": 1, "actor_train": 3, "critic_train": 3,
}  # fmt: skip


def rollout_means(args: Namespace, data: RolloutData) -> dict[str, float]:
    """Return the mean of every numeric per-sample column over all DP x CP ranks (collective on the last stage).

    Columns with a value per response token use the masked rollout mean of the loss; scalars, and tensors of any other
    length (columns of the user's own), a plain mean.
    """
    num_rollouts = sum(int(size) for size in data["global_batch_sizes"])
    reduce_tokens = get_sum_of_sample_mean(
        data["total_lengths"],
        data["response_lengths"],
        data["loss_masks"],
        sample_denoms=data.get("rollout_mask_sums"),
    )
    sizes = [
        slice_log_prob_with_cp(mask, total, response).shape
        for mask, total, response in zip(
            data["loss_masks"], data["total_lengths"], data["response_lengths"], strict=True
        )
    ]
    device = data["loss_masks"][0].device
    local: dict[str, tuple[float | None, float, int]] = {}  # reduced as in the loss, or None; plain sum; how many
    first_of_cp = context_parallel().rank == 0
    for name, column in per_sample_columns(data).items():
        if name in _NOT_METRICS or column is None or not len(column):
            continue
        if all(torch.is_tensor(value) and value.dim() == 1 and value.is_floating_point() for value in column):
            values = torch.cat([value.to(device) for value in column])
            reduced = float(reduce_tokens(values)) if [value.shape for value in column] == sizes else None
            local[name] = (reduced, float(values.sum()), values.numel())
        elif all(isinstance(v, Real) or (torch.is_tensor(v) and v.dim() == 0) for v in column):
            total = math.fsum(float(value) for value in column)
            local[name.removeprefix("local_")] = (None, total, num_samples(data)) if first_of_cp else (None, 0.0, 0)
    gathered = all_gather_objects(local)
    means = {}
    for name in sorted({name for part in gathered for name in part}):
        parts = [part[name] for part in gathered if name in part]
        reduced = [part[0] for part in parts if part[0] is not None]
        if len(reduced) == len(parts):
            means[name] = math.fsum(reduced) / max(num_rollouts, 1)
        else:
            means[name] = math.fsum(part[1] for part in parts) / max(sum(part[2] for part in parts), 1)
    return means


def log_rollout_metrics(args: Namespace, rollout_id: int, data: RolloutData) -> dict[str, float]:
    """Log and return ``rollout/*`` of this rollout.

    Collective over DP x CP on the last stage; the others return {}.
    """
    if not is_last_stage():
        return {}
    means = {**rollout_means(args, data), **correct_sample_means(args, data, all_gather_objects)}
    metrics = {f"rollout/{name}": value for name, value in means.items()}
    if is_main_rank():
        log(args, {**metrics, "rollout/step": rollout_step(args, rollout_id)}, "rollout/step")
    return metrics


def log_train_metrics(args: Namespace, rollout_id: int, steps: list[dict[str, float]], prefix: str = "") -> None:
    """Log ``train/<prefix>*`` of every optimiser step at its place on the axis ``train/step``."""
    if not is_main_rank():
        return
    for step_id, metrics in enumerate(steps):
        named = {f"train/{prefix}{name}": value for name, value in metrics.items()}
        log(args, {**named, "train/step": train_step(args, rollout_id, step_id, len(steps))}, "train/step")


def train_step(args: Namespace, rollout_id: int, step_id: int, num_steps: int) -> int:
    """Return the place of an optimiser step on the ``train/step`` axis.

    The number of steps differs between rollouts where samples are carried over to the next one, so each rollout has
    room for the most that the flags let it make, ``ceil(samples of a rollout / global batch size)``: places are not
    used twice and do not depend on where a run was resumed. Rollouts that make fewer steps leave gaps; a rollout
    function that makes more samples than the flags say may use places of the next rollout.
    """
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    return rollout_id * max(num_steps, -(-samples // args.global_batch_size)) + step_id


def log_perf(args: Namespace, rollout_id: int, shard_lengths: list[int], prefix: str = "") -> dict[str, float]:
    """Log and return ``perf/<prefix>*``: seconds by timer, tokens and TFLOP/s per device, share of time waited.

    ``shard_lengths`` are the total lengths of this DP rank's samples. Collective over DP x CP on the last stage.
    """
    before = f"perf/{prefix}"
    metrics = drain_metrics(before)
    if not is_last_stage():
        return metrics
    lengths = [
        length for part in all_gather_objects(shard_lengths if context_parallel().rank == 0 else []) for length in part
    ]
    tera = dist.get_world_size() * 1e12
    for name, passes in FORWARD_PASSES.items():
        if seconds := metrics.get(f"{before}{name}_time"):
            with_mtp = args.enable_mtp_training and name == "actor_train"  # other passes leave the MTP layers out
            metrics[f"{before}{name}_tflops"] = passes * forward_flops(args, lengths, mtp=with_mtp) / tera / seconds
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
