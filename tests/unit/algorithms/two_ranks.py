"""Computations of two real gloo ranks; run by ``test_collectives`` in separate processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms.log_probs import calculate_log_probs_and_entropy, log_probs_and_entropy
from slime.algorithms.whitening import masked_whiten
from slime.batching.context_parallel import gather_responses_with_cp, slice_response_with_cp


def collectives(
    logits: torch.Tensor, targets: torch.Tensor, lengths: list[tuple[int, int]], values: list[torch.Tensor]
) -> dict[str, Any]:
    """Vocabulary-parallel log-probs, gathering of context-parallel slices with gradients, whitening."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    part = logits.chunk(size, dim=1)[rank].clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        part, targets, tp_group=group, chunk_size=3, with_entropy=True, entropy_grad=True
    )
    (log_probs.sum() + entropy.sum()).backward()
    legacy, _ = calculate_log_probs_and_entropy(part.detach(), targets, group)
    by_default, _ = calculate_log_probs_and_entropy(part.detach(), targets, None)
    nothing = calculate_log_probs_and_entropy(part.detach()[:0], targets[:0], group, with_entropy=True)

    local = [
        slice_response_with_cp(value, total, response, cp_rank=rank, cp_size=size).clone().requires_grad_()
        for value, (total, response) in zip(values, lengths, strict=True)
    ]
    gathered = gather_responses_with_cp(
        local, [t for t, _ in lengths], [r for _, r in lengths], cp_rank=rank, cp_size=size, group=group
    )
    # every rank weighs the whole differently, so the gradient must be the sum of both weights
    sum((rank + 1) * (full * torch.arange(len(full))).sum() for full in gathered).backward()
    whole = torch.cat(values)
    half = whole.chunk(size)[rank]
    result = {
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "logits_grad": part.grad,
        "legacy": legacy,
        "legacy, default group": by_default,
        "legacy, no rows": [values.tolist() for values in nothing],
        "gathered": [full.detach() for full in gathered],
        "local_grads": [x.grad for x in local],
        "whitened": masked_whiten(half, torch.ones_like(half), group=group),
    }
    dist.destroy_process_group()
    return result
