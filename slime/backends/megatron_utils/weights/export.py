"""Write the model as a Hugging Face checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.arguments.args import Args
from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.state.parallel import gather_from_world
from slime.backends.megatron_utils.weights.iterate import Described, describe_hf_weights, iter_hf_weights
from slime.backends.megatron_utils.weights.naming import model_family
from slime.backends.megatron_utils.weights.untrained import write_carried, write_copies
from slime.weights.hf import writer as hf_writer
from slime.weights.hf.checkpoint import quantization_of, read_config
from slime.weights.quantization import Quantizer, read_format


def export_hf(
    model_chunks: Sequence[torch.nn.Module],
    args: Args,
    out_dir: str | Path,
    *,
    max_shard_bytes: int = hf_writer.MAX_SHARD_BYTES,
    quantizer: Quantizer | None = None,
) -> None:
    """Write ``model-00001-of-000NN.safetensors``, the index and the non-weight files of ``args.hf_checkpoint``.

    Collective over all trainer ranks; one rank per pipeline stage writes the shards of its stage to the shared
    directory. Parts of the checkpoint that are not trained here are taken over as they are. Nothing is quantized, even
    if ``args.hf_checkpoint`` is, unless ``quantizer`` makes the tensors of that. The directory appears (or replaces an
    older export) only when it is complete. Raises ValueError when ``out_dir`` is the checkpoint the model came from,
    RuntimeError on every rank when one rank fails.
    """
    import_megatron()
    out = Path(os.path.abspath(out_dir))
    _refuse_source(out, args)
    partial = hf_writer.partial_of(out)
    _everywhere(f"preparing {partial}", lambda: hf_writer.begin(out) if dist.get_rank() == 0 else None)
    plans = _everywhere("planning the shards", lambda: _plan(model_chunks, args, max_shard_bytes, quantizer))
    _everywhere(f"writing to {partial}", lambda: _write_stage(model_chunks, args, partial, plans, quantizer))
    keep = quantizer is not None
    _everywhere(
        f"completing {out}", lambda: _complete(args, partial, out, plans, keep) if dist.get_rank() == 0 else None
    )


def _refuse_source(out: Path, args: Args) -> None:
    source = Path(args.hf_checkpoint)
    if out.exists() and source.exists() and os.path.samefile(out, source):
        raise ValueError(f"refusing to export into {out}: it is --hf-checkpoint, which the run still reads")
    if out.exists() and not out.is_dir():
        raise ValueError(f"cannot export to {out}: it is a file")
    if source.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"refusing to export to {out}: replacing it would remove --hf-checkpoint {source} inside it")


def _everywhere(what: str, action: Callable[[], Any]) -> list[Any]:
    """Run ``action`` on every rank and return all results; if one rank fails, raise on all."""
    result, error = None, None
    try:
        result = action()
    except Exception as e:  # noqa: BLE001  raised below, on every rank, so that none waits for the failed one
        error = f"rank {dist.get_rank()}: {type(e).__name__}: {e}"
    gathered = gather_from_world((result, error))
    errors = [error for _, error in gathered if error]
    if errors:
        raise RuntimeError(f"Hugging Face export failed while {what}: {'; '.join(errors)}")
    return [result for result, _ in gathered]


def _is_writer() -> bool:
    from megatron.core import parallel_state as mpu

    return mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_data_parallel_rank(with_context_parallel=True) == 0


def _plan(
    model_chunks: Sequence[torch.nn.Module], args: Args, max_shard_bytes: int, quantizer: Quantizer | None
) -> tuple[int, list[list[Described]]] | None:
    """Return ``(pipeline stage, tensors of each shard)`` on the writer of a stage, None on other ranks."""
    from megatron.core import parallel_state as mpu

    if not _is_writer():
        return None
    shards: list[list[Described]] = []
    room = 0
    for described in described_weights(model_chunks, args, quantizer):
        size = _bytes(described)
        if size > room or not shards:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(described)
        room -= size
    return mpu.get_pipeline_model_parallel_rank(), shards


def described_weights(
    model_chunks: Sequence[torch.nn.Module], args: Args, quantizer: Quantizer | None
) -> Sequence[Described]:
    """Return ``(name, shape, dtype)`` of what this stage exports, in that order; not collective."""
    weights = describe_hf_weights(model_chunks, args)
    if quantizer is None:
        return weights
    empty = ((name, torch.empty(shape, dtype=dtype, device="meta")) for name, shape, dtype in weights)
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in quantizer.stream(empty)]


def _bytes(described: Described) -> int:
    _, shape, dtype = described
    return torch.Size(shape).numel() * dtype.itemsize


def _file_names(plans: list[Any]) -> dict[int, list[str]]:
    """Return the shard file names of each stage, numbered over all stages from 1."""
    stages = dict(sorted(plan for plan in plans if plan is not None))
    total = sum(len(shards) for shards in stages.values())
    names, number = {}, 0
    for stage, shards in stages.items():
        names[stage] = [hf_writer.shard_name(number + i + 1, total) for i in range(len(shards))]
        number += len(shards)
    return names


def _write_stage(
    model_chunks: Sequence[torch.nn.Module],
    args: Args,
    partial: Path,
    plans: list[Any],
    quantizer: Quantizer | None,
) -> None:
    from megatron.core import parallel_state as mpu
    from safetensors.torch import save_file

    weights = iter_hf_weights(model_chunks, args)
    tensors_to_write = weights if quantizer is None else quantizer.stream(weights)
    try:
        if _is_writer():
            names = _file_names(plans)[mpu.get_pipeline_model_parallel_rank()]
            for file, shard in zip(names, plans[dist.get_rank()][1], strict=True):
                # Every tensor is copied: a view of a parameter buffer cannot be saved on its own.
                tensors = {name: tensor.cpu().clone() for name, tensor in (next(tensors_to_write) for _ in shard)}
                save_file(tensors, partial / file, metadata={"format": "pt"})
    finally:
        for _ in weights:  # the gathers need every rank of the tensor-parallel group, even after a failed write
            pass


def _complete(args: Args, partial: Path, out: Path, plans: list[Any], keep: bool) -> None:
    """``keep``: the quantization of ``--hf-checkpoint``; otherwise nothing of the export is quantized."""
    source, family = Path(args.hf_checkpoint), model_family(args)
    shards, size = _written(plans)
    if args.mtp_num_layers:
        copies, more = write_copies(source, partial, family, shards)
        shards, size = {**shards, **copies}, size + more
    described = quantization_of(read_config(source))
    form = None if keep or described is None else read_format(described)
    carried, more = write_carried(source, partial, family, shards, form)
    hf_writer.write_index(partial, {**shards, **carried}, size + more)
    hf_writer.copy_other_files(source, partial)
    if not keep:
        tensors = [tensor for plan in plans if plan is not None for shard in plan[1] for tensor in shard]
        hf_writer.write_dtype(partial, ((shape, dtype) for _, shape, dtype in tensors))
        hf_writer.remove_quantization(partial)
    hf_writer.publish(partial, out)


def _written(plans: list[Any]) -> tuple[dict[str, str], int]:
    """Return ``tensor name -> file`` of all stages, and the bytes."""
    names, files, total = _file_names(plans), {}, 0
    for stage, shards in (plan for plan in plans if plan is not None):
        for file, shard in zip(names[stage], shards, strict=True):
            files.update({described[0]: file for described in shard})
            total += sum(_bytes(described) for described in shard)
    return files, total
