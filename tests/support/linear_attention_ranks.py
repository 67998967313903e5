"""Ranks of ``test_linear_attention``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def exchange(lengths: list[int], heads: list[int]) -> list[dict[str, Any]]:
    """Send each token its number, by head, to the sequences and back; weigh what is returned, and differentiate."""
    from slime.backends.megatron_utils.initialize import import_megatron

    import_megatron()
    dist.init_process_group("gloo")
    from slime_plugins.models.linear_attention import HeadExchange

    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    results = []
    for count in heads:
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        mine = []
        for start, length in zip(starts, lengths, strict=True):
            chunk = length // (2 * size)
            for at in (rank, 2 * size - 1 - rank):
                mine += range(start + at * chunk, start + (at + 1) * chunk)
        tokens = torch.tensor(mine, dtype=torch.float64)
        x = (tokens[:, None, None] + 1000 * torch.arange(count)[:, None]).expand(-1, -1, 3).clone().requires_grad_()
        exchange = HeadExchange(group, lengths, count, torch.device("cpu"))
        sequences = exchange.to_sequences(x)
        back = exchange.to_tokens(sequences)
        (gradient,) = torch.autograd.grad((back * (rank + 1)).sum(), x)
        results.append({
            "own": exchange.own(torch.arange(count)).tolist(), "sequences": sequences[..., 0].tolist(),
            "same": bool(torch.equal(back, x)), "gradient": gradient.unique().tolist(), "rank": rank,
        })  # fmt: skip
    return results


def both_modules(checkpoint: str) -> list[dict[str, Any]]:
    """Return logits and gradients under CP2 of slime's module, and of that of transformers."""
    from tests.support.megatron_model import hf_gradients, model_args, run_pack
    from tests.support.model_families import LAYOUTS
    from tests.support.ranks import loaded_model, switch_layout

    found = []
    for spec in ("slime_plugins.models.qwen3_5 get_qwen3_5_spec", "tests.support.attention_of_transformers get_spec"):
        args = model_args(checkpoint, *LAYOUTS["cp2"], "--spec", *spec.split())
        args.use_distributed_optimizer = False  # so that every rank has all gradients
        switch_layout(args)
        model = loaded_model(args, Path(checkpoint))
        found.append({"pack": run_pack(model, args), "gradients": dict(hf_gradients(model, args))})
    return found
