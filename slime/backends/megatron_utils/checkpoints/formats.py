"""Checkpoints in Megatron's formats ``torch`` and ``torch_dcp``, which are read under the layout they were saved under.

``torch``: a file of the rank's own state dict per tensor-, pipeline- and expert-parallel rank, and beside it the state
of the distributed optimizer, gathered from its data-parallel ranks. ``torch_dcp``: one PyTorch distributed checkpoint
of a model that is not divided but by data and context parallelism.
"""

from __future__ import annotations

import pickle
import zipfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slime.backends.megatron_utils.checkpoints.directory import TORCH, TORCH_DCP, stored_format
from slime.backends.megatron_utils.checkpoints.pickles import load_file, loads
from slime.backends.megatron_utils.state.optimizer import complete_steps
from slime.backends.megatron_utils.state.parallel import (
    expert_parallel,
    first_error,
    gather_from_world,
    pipeline_parallel,
    tensor_parallel,
)
from slime.utils.distributed_utils import control_group

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.transformer.module import MegatronModule

# What torch and pickle raise for files that are not what was written.
DAMAGE = (EOFError, OSError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile)

Chunks = Sequence[tuple[str, torch.nn.Module]]
"""The parts of the model on this rank, by their names in checkpoints: ``model``, or ``model0``, ``model1``, ..."""

_FILE, _OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"


def writer_for(
    form: str,
    directory: Path,
    chunks: Chunks,
    optimizer: ChainedOptimizer | None,
    common: dict[str, Any],
    device: torch.device,
) -> Callable[[], None]:
    """Return what writes this rank's part of a checkpoint into ``directory`` (collective, and so is what it returns).

    ``optimizer``: Megatron's, or None to leave its state out. ``common``: what is saved beside tensors. ``device`` is
    that of messages between ranks.
    """
    common = {
        **common,
        "args": _sizes(),
        "slime_trained": _trained(chunks),
        "slime_distributed_optimizer": optimizer is not None and _is_distributed(optimizer),
    }
    state = {name: _named_tensors(chunk) for name, chunk in chunks}
    if optimizer is not None:
        state["optimizer"] = _by_place(optimizer.state_dict())
        if _is_distributed(optimizer):
            complete_steps(state["optimizer"], device)
    if form == TORCH_DCP:
        return lambda: _write_dcp(directory, state, optimizer, common)
    path = directory / _rank_name() / _FILE
    writes = gather_from_world(_rank_name()).index(_rank_name()) == dist.get_rank()
    return lambda: _write_torch(path, {**common, **state} if writes else None, optimizer)


def _write_torch(path: Path, state: dict[str, Any] | None, optimizer: ChainedOptimizer | None) -> None:
    path.parent.mkdir(exist_ok=True)
    if optimizer is not None and _is_distributed(optimizer):
        optimizer.save_parameter_state(str(path.with_name(_OPTIMIZER_FILE)))  # its data-parallel rank 0 writes
    if state is not None:
        torch.save(state, path)


def _write_dcp(
    directory: Path, state: dict[str, Any], optimizer: ChainedOptimizer | None, common: dict[str, Any]
) -> None:
    if optimizer is not None:
        common = {**common, "optimizer": {place: {} for place in state["optimizer"] if isinstance(place, int)}}
        state = {**state, "optimizer": _in_words(state["optimizer"])}
        if _is_distributed(optimizer):
            state["optimizer_parameters"] = _gathered(optimizer)
    dcp.save({**state, "common": pickle.dumps(common)}, checkpoint_id=directory, process_group=control_group())


def _in_words(state: dict[Any, Any]) -> dict[str, Any]:
    """Return the state of optimizers under keys that ``torch_dcp`` keeps: it makes words of numbers."""
    return {str(key): value for key, value in state.items()}


def _gathered(optimizer: ChainedOptimizer, *, empty: bool = False) -> list[Any]:
    """Return the parameters' state of every distributed optimizer of the chain; None where another rank has it."""
    return [part.get_parameter_state_dp_zero(empty_data=empty) for part in optimizer.chained_optimizers]


def read_common(directory: Path, form: str, chunks: Chunks, *, with_optimizer: bool) -> dict[str, Any]:
    """Return what a checkpoint holds beside tensors; of ``torch`` everything. Collective.

    Raises ValueError, on all ranks, when it was saved under another layout, or (``with_optimizer``) when other
    parameters were trained.
    """
    failure: BaseException | None = None
    common: dict[str, Any] = {}
    try:
        common = _stored(directory, form, lazily=not with_optimizer)
    except (*DAMAGE, CheckpointException) as e:
        failure = e
    if failure is not None:
        own: str | None = f"checkpoint {directory} cannot be read on rank {dist.get_rank()}: {failure}"
    else:
        own = _misfit(directory, form, common, chunks, with_optimizer)
    message = first_error(own)
    if failure is not None:
        raise failure
    if message is not None:
        raise ValueError(message)
    if "optimizer" in common:
        common["optimizer"] = _by_place(common["optimizer"])
    return common


def _stored(directory: Path, form: str, *, lazily: bool) -> dict[str, Any]:
    """Return what this rank's file holds, or what ranks share; nothing where this rank has no file."""
    if form == TORCH_DCP:
        stored = {"common": b""}
        dcp.load(stored, checkpoint_id=directory, no_dist=True)
        return dict(loads(stored["common"]))
    path = directory / _rank_name() / _FILE
    return load_file(path, mmap=lazily) if path.is_file() else {}


def _misfit(directory: Path, form: str, common: dict[str, Any], chunks: Chunks, with_optimizer: bool) -> str | None:
    own = vars(_sizes())
    saved = {name: getattr(common.get("args"), name, None) or 1 for name in own} if common else None
    if saved != own:
        held = ", ".join(sorted(path.name for path in directory.glob("mp_rank_*"))) or "the whole model"
        return (
            f"checkpoint {directory} is of the format {form}, which is read under the layout it was saved under: it "
            f"holds {held}, and this run has {', '.join(f'{_flag(n)} {size}' for n, size in own.items())}"
            + (f", not {', '.join(f'{_flag(n)} {size}' for n, size in saved.items())}" if saved else "")
            + ". Resume it under its own layout with --ckpt-format torch_dist: what is saved then is read under any"
        )
    if with_optimizer and "optimizer" in common and common.get("slime_trained", _trained(chunks)) != _trained(chunks):
        return (
            f"the optimizer state in {directory} is of other parameters than those trained now: look at "
            "--only-train-params-name-list and --freeze-params-name-list, or take the weights alone with "
            "--no-load-optim"
        )
    return None


def read_model(
    directory: Path, form: str, common: dict[str, Any], name: str, wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the tensors ``wanted`` (own name -> tensor) of the chunk ``name``; those of ``torch_dcp`` are overwritten.

    Raises ValueError when one is not there or has another shape.
    """
    tensors = {key: value for key, value in wanted.items() if torch.is_tensor(value)}
    if form == TORCH_DCP:
        dcp.load({name: tensors}, checkpoint_id=directory, no_dist=True)
        return tensors
    stored = common.get(name, {})
    differing = [
        f"{key} {list(value.shape)} ({list(stored[key].shape) if key in stored else 'absent'} there)"
        for key, value in tensors.items()
        if key not in stored or stored[key].shape != value.shape
    ]
    if differing:
        raise ValueError(
            f"checkpoint {directory / _rank_name()} is of another model: of {len(tensors)} parameters here "
            f"{len(differing)} differ, {'; '.join(differing[:3])}. Check the flags of the model"
        )
    return {key: stored[key] for key in tensors}


def shapes_of(directory: Path, key: str) -> set[tuple[int, ...]]:
    """Return the shapes that the tensor ``key`` of the model has, in the files of all ranks."""
    if stored_format(directory) == TORCH_DCP:
        found = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata.get(f"model.{key}")
        return {tuple(found.size)} if isinstance(found, TensorStorageMetadata) else set()
    shapes = set()
    for path in directory.glob(f"mp_rank_*/{_FILE}"):
        stored = load_file(path, mmap=True)
        chunks = [value for name, value in stored.items() if name.startswith("model") and isinstance(value, dict)]
        shapes |= {tuple(chunk[key].shape) for chunk in chunks if key in chunk}
    return shapes


@torch.no_grad()
def load_optimizer(directory: Path, form: str, common: dict[str, Any], optimizer: ChainedOptimizer) -> None:
    """Fill ``optimizer``. Collective. Raises ValueError for the state of another kind of optimizer."""
    distributed = _is_distributed(optimizer)
    if distributed != common.get("slime_distributed_optimizer", distributed):
        raise ValueError(
            f"the optimizer state in {directory} was saved {'without' if distributed else 'with'} "
            "--use-distributed-optimizer, this run differs in it. Take the weights alone with --no-load-optim"
        )
    if form == TORCH:
        optimizer.load_state_dict(common["optimizer"])
        path = directory / _rank_name() / _OPTIMIZER_FILE
        cut = path.is_file() and not zipfile.is_zipfile(path)
        if message := first_error(f"{path} is damaged or cut off. Choose another --ckpt-step" if cut else None):
            raise ValueError(message)  # one rank reads, and the others would wait for its messages
        if distributed:
            optimizer.load_parameter_state(str(path))
        return
    for part in optimizer.chained_optimizers:
        if not distributed and not part.optimizer.state:  # as TransformerEngine's Adam before its first step
            part.init_state_fn(part.optimizer, part.config)
    own = _by_place(optimizer.state_dict())
    stored: dict[str, Any] = {"optimizer": _in_words(own)}
    if distributed:
        stored["optimizer_parameters"] = _gathered(optimizer, empty=True)
    dcp.load(stored, checkpoint_id=directory, no_dist=True)
    optimizer.load_state_dict({key: stored["optimizer"][str(key)] for key in own})
    for part, gathered in zip(optimizer.chained_optimizers, stored.get("optimizer_parameters", ()), strict=False):
        part.load_parameter_state_from_dp_zero(gathered)


def _sizes() -> Namespace:
    """Return what a checkpoint says of the layout, under Megatron-LM's names."""
    return Namespace(
        tensor_model_parallel_size=tensor_parallel().size,
        pipeline_model_parallel_size=pipeline_parallel().size,
        expert_model_parallel_size=expert_parallel().size,
    )


def _rank_name() -> str:
    """The directory of this rank's part, as Megatron-LM names it."""
    tp, pp, ep = tensor_parallel(), pipeline_parallel(), expert_parallel()
    name = f"mp_rank_{tp.rank:02d}"
    if pp.size > 1:
        name += f"_{pp.rank:03d}"
    return f"{name}_{ep.rank:03d}" if ep.size > 1 else name


def _trained(chunks: Chunks) -> int:
    return sum(p.numel() for _, chunk in chunks for p in chunk.parameters() if p.requires_grad)


def _is_distributed(optimizer: ChainedOptimizer) -> bool:
    return any(hasattr(part, "get_parameter_state_dp_zero") for part in optimizer.chained_optimizers)


def _by_place(state: dict[Any, Any] | list[Any]) -> dict[Any, Any]:
    """Return the states of a chain by number, as ``torch_dist`` has them; that of a single optimizer as it is."""
    return dict(enumerate(state)) if isinstance(state, list) else state


def _named_tensors(chunk: MegatronModule) -> dict[str, Any]:
    return dict(chunk.state_dict_for_save_checkpoint())


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
