"""Checkpoints of adapters alone, and the base model that they belong to."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, cast

import torch

from slime.arguments.args import Args
from slime.backends.megatron_utils.checkpoints.directory import find_checkpoint, is_megatron_checkpoint
from slime.backends.megatron_utils.lora.adapter import adapters_of
from slime.backends.megatron_utils.lora.experts import ExpertAdapter
from slime.backends.megatron_utils.state.parallel import (
    data_parallel,
    expert_parallel,
    expert_tensor_parallel,
    tensor_parallel,
)
from slime.backends.megatron_utils.weights.merging import ADAPTER

_SAMPLED = 1 << 16


def base_of(args: Args) -> str:
    """Return the checkpoint with the base model, which is the reference as well."""
    return str(args.ref_load or args.hf_checkpoint)


def base_digest(args: Args) -> str:
    """Return a hash that tells base models apart: of names, sizes, first and last 64 KiB of the files with weights.

    The first bytes hold names and shapes of the tensors. Reading hundreds of gigabytes at every start would not do.
    """
    base = base_of(args)
    directory = find_checkpoint(base, args.ref_ckpt_step)[0] if is_megatron_checkpoint(base) else Path(base)
    digest = hashlib.sha256()
    for path in sorted(
        p for pattern in ("*.safetensors", "*.distcp", "mp_rank_*/*.pt") for p in directory.glob(pattern)
    ):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLED))
            file.seek(max(0, size - _SAMPLED))
            digest.update(file.read())
    return digest.hexdigest()


def described(args: Args, targets: list[str]) -> dict[str, Any]:
    """Return what a checkpoint says about its adapters."""
    base = base_of(args)
    parts = {"rank": args.lora_rank, "alpha": args.lora_alpha, "targets": targets}
    return {**parts, "base": base, "base_digest": base_digest(args)}


def check_described(saved: dict[str, Any] | None, own: dict[str, Any] | None, directory: Path) -> None:
    """Raise ValueError when a checkpoint's adapters (None: it has the whole model) are not those of this run."""
    if saved is None and own is None:
        return
    if own is None:
        assert saved is not None
        raise ValueError(
            f"checkpoint {directory} has adapters alone, on the base {saved['base']}: give --lora-rank {saved['rank']} "
            f"--lora-alpha {saved['alpha']} --lora-target-modules {' '.join(saved['targets'])}"
        )
    if saved is None:
        raise ValueError(
            f"checkpoint {directory} has a whole model and no adapters: with --lora-rank it can be the base, as "
            "--ref-load, and --load takes checkpoints that were saved with --lora-rank"
        )
    for key in ("rank", "alpha", "targets"):
        if saved[key] != own[key]:
            flag = "--lora-target-modules" if key == "targets" else f"--lora-{key}"
            raise ValueError(f"checkpoint {directory} has adapters with {flag} {saved[key]}, this run {own[key]}")
    if saved["base_digest"] != own["base_digest"]:
        raise ValueError(
            f"the adapters in {directory} belong to the base {saved['base']} as it was then, and the weights of "
            f"{own['base']} are others; let --ref-load be the base that they were trained on"
        )


def base_part(sharded: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a chunk's sharded state that are not of adapters."""
    return {name: entry for name, entry in sharded.items() if f".{ADAPTER}." not in name}


def trained_part(chunk: torch.nn.Module, sharded: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of what is trained: adapters, under names of the whole model, and a critic's value head."""
    trained = {name for name, parameter in chunk.named_parameters() if parameter.requires_grad}
    return {name: entry for name, entry in base_part(sharded).items() if name in trained} | _adapters(chunk)


def _adapters(chunk: torch.nn.Module) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    entries: dict[str, Any] = {}
    for name, _, adapter in adapters_of(chunk):
        for target in adapter.targets:
            for part in ("lora_A", "lora_B"):
                parameter = getattr(adapter.projection(target), part)
                cut: list[tuple[int, int, int]] = []
                ranks = tensor_parallel()
                if experts := isinstance(adapter, ExpertAdapter):
                    ranks, blocks = expert_tensor_parallel(), expert_parallel()
                    cut.append((0, blocks.rank, blocks.size))
                is_cut = (adapter.kind, part) in (("column", "lora_B"), ("row", "lora_A"))
                if is_cut:
                    cut.append((parameter.dim() - (2 if part == "lora_B" else 1), ranks.rank, ranks.size))
                place = adapter.rule.megatron[0].replace("{layer}", str(adapter.layer)).replace("{expert}", "")
                entries[f"{name}.{ADAPTER}.{target}.{part}"] = ShardedTensor.from_rank_offsets(
                    f"{place}.{ADAPTER}.{target}.{part}",
                    cast(Any, parameter),
                    *cut,
                    replica_id=(0, 0 if is_cut else ranks.rank, _copies(experts)),
                )
    return entries


def _copies(experts: bool) -> int:
    """Return this rank's number among those that hold the same adapters by data parallelism."""
    if not experts:
        return data_parallel(with_context_parallel=True).rank
    from megatron.core import parallel_state

    return int(parallel_state.get_expert_data_parallel_rank())
