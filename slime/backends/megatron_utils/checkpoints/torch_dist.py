"""Read the weights of a Megatron ``torch_dist`` checkpoint one by one, without Megatron and without a process group."""

from __future__ import annotations

import pickle
import re
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slime.backends.megatron_utils.checkpoints import directory as checkpoint_dir
from slime.backends.megatron_utils.checkpoints.pickles import check_metadata
from slime.backends.megatron_utils.state.parallel import unwrap
from slime.backends.megatron_utils.weights.maps.vision import TOWER

# A key of all layers of a decoder, or of one of them, has the layer's number in the tensor's first dimension or in it.
_ALL_LAYERS = re.compile(r"^decoder\.layers\.(?!\d+\.)")
# The experts of a layer are one tensor with an additional first dimension, or a tensor each.
_EXPERTS = re.compile(r"^(?P<head>.*?\.experts\.)(?:experts\.)?(?:(?P<number>\d+)\.)?(?P<tail>linear_fc\d\.\w+)$")
# Optimizer states, random states and TransformerEngine's extra states are no weights.
_NO_WEIGHT = re.compile(r"optimizer|_state")

NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("self_attention.linear_qk.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
)
"""The two names of a norm. TransformerEngine fuses it into the linear layer behind it where it can; Megatron names the
norms of its own layers likewise in checkpoints, but for those before experts, before linear attention and in latent
attention."""


@dataclass(frozen=True)
class StoredWeight:
    """Entry ``index`` of the stored tensor ``key``; ``name`` is the global Megatron name, as for ``Family.find``."""

    name: str
    key: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class TorchDistCheckpoint:
    """The weights in ``directory``: one iteration (``iter_0000012``), or a ``--save`` directory, whose last it takes.

    Tensors are put together from the shards of any parallel layout that wrote them. Raises FileNotFoundError and
    ValueError for what is no complete checkpoint.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = _iteration(Path(directory))
        check_metadata(self.path)
        self._reader = FileSystemReader(self.path)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.weights = tuple(
            weight
            for key, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and not _NO_WEIGHT.search(key)
            for weight in _weights_of(key, stored)
        )
        if any(".adapter." in weight.name for weight in self.weights):
            raise ValueError(
                f"{self.path} holds adapters alone (--lora-rank), and no whole model: its directory `adapter` is what "
                "PEFT and engines load, and --save-hf writes the model with the adapters merged"
            )
        if not self.weights:
            raise ValueError(
                f"{self.path} holds no weights: its keys are {sorted(self._metadata.state_dict_metadata)[:8]}"
            )

    def read(self, weight: StoredWeight) -> torch.Tensor:
        """Return the whole tensor, contiguous, on the CPU. Raises ValueError when the checkpoint lacks a part of it."""
        stored = self._metadata.state_dict_metadata[weight.key]
        assert isinstance(stored, TensorStorageMetadata)
        ahead = len(weight.index)
        target = torch.empty((*(1,) * ahead, *weight.shape), dtype=weight.dtype)
        place = ChunkStorageMetadata(torch.Size((*weight.index, *(0,) * len(weight.shape))), target.shape)
        items = create_read_items_for_chunk_list(weight.key, stored, [place])
        found = sum(torch.Size(item.lengths).numel() for item in items)
        if found != target.numel():
            raise ValueError(
                f"{self.path}: {found} of {target.numel()} numbers of {weight.name} {list(weight.shape)} are stored: a "
                "file of the checkpoint was written by fewer ranks than the others, or belongs to another one"
            )
        self._reader.read_data(LoadPlan(items), _Into(target))
        return target.view(weight.shape)

    def training_args(self) -> Namespace | None:
        """Return the command line that Megatron-LM stores beside the weights; None where there is none.

        Nothing of the file is run: everything but a plain value becomes an empty object.
        """
        common = torch.load(self.path / "common.pt", map_location="cpu", weights_only=False, pickle_module=_PlainPickle)
        args = common.get("args") if isinstance(common, dict) else None
        return args if isinstance(args, Namespace) else None


def _iteration(directory: Path) -> Path:
    form = checkpoint_dir.TORCH if any(directory.glob("mp_rank_*")) else checkpoint_dir.TORCH_DIST
    if checkpoint_dir.is_megatron_checkpoint(directory):
        directory = checkpoint_dir.find_checkpoint(directory)[0]
        form = checkpoint_dir.stored_format(directory)
    if form != checkpoint_dir.TORCH_DIST:
        raise ValueError(
            f"{directory} is of --ckpt-format {form}, and torch_dist is what is converted: resume it with "
            "--ckpt-format torch_dist and convert what is saved then, or let the run export with --save-hf"
        )
    if not directory.is_dir():
        raise FileNotFoundError(f"there is no directory {directory}")
    absent = [name for name in (".metadata", "common.pt") if not (directory / name).is_file()]
    if absent:
        raise ValueError(
            f"{directory} is no torch_dist checkpoint: it has no {' and no '.join(absent)}. Give a --save directory "
            f"(with {checkpoint_dir.TRACKER}) or one of its iterations (iter_0000012)"
        )
    return directory


def _weights_of(key: str, stored: TensorStorageMetadata) -> list[StoredWeight]:
    """Return the weights in a stored tensor ``[layers?, experts?, ...]``."""
    experts = _EXPERTS.match(key)
    name, counted = key, 1 if _ALL_LAYERS.match(key) else 0
    if counted:
        name = _ALL_LAYERS.sub("decoder.layers.{layer}.", name)
    if experts:
        head, number, tail = experts["head"], experts["number"], experts["tail"]
        head = _ALL_LAYERS.sub("decoder.layers.{layer}.", head)
        name, counted = f"{head}{tail}{number or '{expert}'}", counted + (number is None)
    sizes, dtype = tuple(stored.size), stored.properties.dtype
    weights = []
    for index in _indices(sizes[:counted]):
        numbers = list(index)
        layer = numbers.pop(0) if "{layer}" in name else None
        expert = numbers.pop(0) if "{expert}" in name else None
        weights.append(StoredWeight(name.format(layer=layer, expert=expert), key, index, sizes[counted:], dtype))
    return weights


def _indices(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    indices: list[tuple[int, ...]] = [()]
    for size in sizes:
        indices = [(*index, i) for index in indices for i in range(size)]
    return indices


class _Into(LoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._target
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dimension, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It is in its place already."""

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        self._not_used()

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._not_used()

    def create_local_plan(self) -> LoadPlan:
        self._not_used()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self._not_used()

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        self._not_used()

    def _not_used(self) -> NoReturn:
        raise NotImplementedError("the plan is made by hand: only tensors are read")


class _Empty:
    """Stands for an object of a class that is not installed, or that a file should not be trusted with."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


class _PlainPickle:
    """Pickle module for ``torch.load`` that makes namespaces and tensors and nothing else."""

    _ALLOWED = (("argparse", "Namespace"), ("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2"))

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return super().find_class(module, name) if (module, name) in _PlainPickle._ALLOWED else _Empty


def rename_to_stored(request: dict[str, Any], stored: Collection[str]) -> list[str]:
    """Ask for norms, and their optimizer states, by the names that a checkpoint has; return those names.

    ``request``: a nested state dict of Megatron's sharded tensors, changed in place. ``stored``: the names of all
    tensors of the checkpoint. What it has under neither name is left for Megatron to report.
    """
    renamed = []
    for tensor in _sharded(request):
        if tensor.key not in stored:
            for pair in (*NORMS, *((b, a) for a, b in NORMS)):
                name = tensor.key.replace(*pair)
                if name in stored:
                    tensor.key = name
                    renamed.append(name)
                    break
    return renamed


def take_unstored(request: dict[str, Any], stored: Collection[str], *, tower: bool) -> dict[str, Any]:
    """Take out of a model's request what a checkpoint lacks; return what it is now.

    That are states beside weights, of which TransformerEngine's layers have some, empty without FP8, that Megatron's
    own do not write; with ``tower`` the weights of the vision tower, too.
    """
    absent = [key for key, part in request.items() if key.endswith("_extra_state") and part.unique_key not in stored]
    absent += [key for key in request if tower and key.startswith(TOWER)]
    return {key: request.pop(key).data for key in absent}


def _sharded(part: object) -> Iterator[Any]:
    if isinstance(part, dict):
        part = list(part.values())
    if isinstance(part, list | tuple):
        for inner in part:
            yield from _sharded(inner)
    elif hasattr(part, "key") and hasattr(part, "replica_id"):
        yield part


def lacks_tower(
    model: Sequence[torch.nn.Module], stored: Collection[str], directory: Path, *, with_optimizer: bool
) -> bool:
    """Return True if the model trains its vision tower and a checkpoint, with the names ``stored``, has none.

    Raises ValueError if the optimizer state of one is needed then, or if the tower of a checkpoint would be left out.
    """
    trains = getattr(unwrap(model[0]), "trains_tower", None)
    if trains is None:  # a model without images
        return False
    is_stored = any(name.startswith(TOWER) for name in stored)
    if is_stored and not trains:
        raise ValueError(
            f"checkpoint {directory} has a trained vision tower, and this run would take that of --hf-checkpoint: add "
            "--train-vision-tower, or export the checkpoint and give that as --hf-checkpoint"
        )
    if trains and not is_stored and with_optimizer:
        raise ValueError(
            f"checkpoint {directory} has no vision tower, and no optimizer state of one: its run left that of its "
            "--hf-checkpoint as it was. To train that from now on, take the weights alone with --no-load-optim"
        )
    return bool(trains and not is_stored)
