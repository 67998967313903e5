"""Take changes of the weights instead of weights, in place: no file, and no second copy of the model.

A message of ``slime.weights.delta.message`` arrives as a bucket of weights does, by broadcast. Every tensor of it
is made up to its full size: new values where the weight has changed, all ones elsewhere. The model's own
``load_weights`` then does with it what it does with a checkpoint's (names, fused layers, the shards of a rank,
experts), and where it copies into a parameter, elements of all ones are left out: the parameter keeps what it has.

That a model loads by copying, and derives nothing from it that a part cannot renew, is tried and not assumed: after all
weights have been sent the engine loads tensors that are all ones from end to end, and refuses changes unless not a bit
of its parameters has moved. Changes are taken only by parameters that are, by their hash, what the changes were made
from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch.utils._python_dispatch import TorchDispatchMode

from slime.utils.structured_error import to_text
from slime.weights.delta.codec import CorruptDeltaError, read_sparse
from slime.weights.delta.manifest import Version
from slime.weights.delta.message import DTYPE, Message, Part
from slime_engine_plugin.hook_points import require
from slime_engine_plugin.weights.drafts import loading_too, own_drafts

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from torch._ops import OpOverload

    from slime.weights.p2p.plan import LoadableModel

logger = logging.getLogger(__name__)

ALL_ONES = -1
"""The bits of an element that has not changed, read as a signed integer: a NaN of every floating-point type."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RefusedError(Exception):
    """The model is not what the changes are for, or cannot take changes."""


@dataclass
class Held:
    """Weights of a model: ``version``, in parameters of ``hash``; ``applying`` between two messages."""

    version: Version | None = None
    hash: int = 0
    applying: Version | None = None
    takes_changes: bool = False


_held: WeakKeyDictionary[torch.nn.Module, Held] = WeakKeyDictionary()


class KeepUnchanged(TorchDispatchMode):
    """Copies into the parameters of ``model`` leave out the elements of the source that are all ones."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._memory = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].untyped_storage().data_ptr() in self._memory:
            target, source = args[0], args[1].to(args[0].device)
            bits = source.view(BITS[source.element_size()])
            if source.dtype == target.dtype:
                own = target.view(bits.dtype)
                func(own, torch.where(bits == ALL_ONES, own, bits))
            else:
                func(target, torch.where(bits == ALL_ONES, target, source.to(target.dtype)))
            return target
        return func(*args, **(kwargs or {}))


def take(
    original: Callable[..., tuple[bool, str]],
    updater: WeightUpdater,
    names: Sequence[str],
    dtypes: Sequence[Any],
    shapes: Sequence[Sequence[int]],
    group_name: str,
    load_format: str | None = None,
) -> tuple[bool, str]:
    """Around ``WeightUpdater.update_weights_from_distributed``: receive a message, and take it."""
    target = updater.get_model()
    drafts = own_drafts(target)
    if list(dtypes) != [DTYPE]:
        with loading_too(target, drafts):
            return original(updater, names, dtypes, shapes, group_name, load_format)
    from sglang.srt.distributed import get_tp_group

    updater._assert_weight_cache_inactive("update_weights_from_distributed")
    why = None
    try:
        received = torch.empty(list(shapes[0]), dtype=torch.uint8, device=updater.device)
        dist.broadcast(received, src=0, group=updater._model_update_group[group_name])
        for model in (target, *drafts):
            take_message(model, received)
    except Exception as e:  # noqa: BLE001  (the scheduler lives on, and all weights are sent to it)
        logger.warning("changes were not taken: %s: %s", type(e).__name__, e)
        why = f"{type(e).__name__}: {e}"
    group = get_tp_group()
    reasons = [why]
    if group.world_size > 1:
        reasons = [None] * group.world_size
        dist.all_gather_object(reasons, why, group=group.cpu_group)
    found = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    if not found:
        return True, "Success"
    return False, to_text(f"these changes are not for this engine: {'; '.join(found)}", {"refused": True})


def take_message(model: LoadableModel, received: torch.Tensor) -> None:
    """Bring ``model`` one message further. Raises RefusedError or CorruptDeltaError; its weights are not to be used
    then, but where they were refused at the first message.
    """
    message, payloads = Message.unpack(received.cpu().numpy().data)
    held = _held.setdefault(model, Held())
    if message.base is None:
        held.version = None
        held.hash = hash_of(model.parameters())
        if not held.takes_changes:
            load(model, message.parts, payloads, received.device)
            if hash_of(model.parameters()) != held.hash:
                raise RefusedError(f"{type(model).__name__} does more with a weight that it loads than to copy it")
            held.takes_changes = True
        held.version = message.target
        return
    if message.first:
        if held.version != message.base:
            raise RefusedError(f"expected weights of version {message.base}, found {held.version}")
        if hash_of(model.parameters()) != held.hash:
            raise RefusedError(f"the weights of version {message.base} have been changed since")
        held.version, held.applying = None, message.target
    elif held.applying != message.target:
        raise RefusedError(f"expected changes towards version {held.applying}, found {message.target}")
    load(model, message.parts, payloads, received.device)
    if message.last:
        held.version, held.applying, held.hash = message.target, None, hash_of(model.parameters())


@torch.no_grad()
def load(
    model: LoadableModel, parts: Sequence[Part], payloads: Sequence[memoryview], device: torch.device | str
) -> None:
    """Load the tensors of a message."""
    whole = [item for item in zip(parts, payloads, strict=True) if item[0].plain]
    if whole:
        model.load_weights(full_tensors(whole, device))
    with KeepUnchanged(model):
        model.load_weights(
            full_tensors([item for item in zip(parts, payloads, strict=True) if not item[0].plain], device)
        )


def full_tensors(
    items: Sequence[tuple[Part, memoryview]], device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)``, with elements of all ones where nothing has changed."""
    for part, payload in items:
        dtype: torch.dtype = getattr(torch, part.dtype)
        bits = BITS[min(dtype.itemsize, 8)]
        if part.form == "whole":
            content = torch.frombuffer(bytearray(payload), dtype=bits).to(device)
        else:
            content = torch.full((torch.Size(part.shape).numel(),), ALL_ONES, dtype=bits, device=device)
        if part.form == "sparse":
            positions, values = read_sparse(payload, dtype.itemsize, content.numel())
            signed = torch.from_numpy(values.view(f"<i{values.itemsize}"))
            content[torch.from_numpy(positions).to(device)] = signed.to(device)
        if content.numel() != torch.Size(part.shape).numel():
            raise CorruptDeltaError(f"{part.name}: {content.numel()} elements do not make {part.shape}")
        yield part.name, content.view(dtype).reshape(part.shape)


def hash_of(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Return a hash over ``parameters``, as this rank has them."""
    from sglang.srt.managers.mm_utils import tensor_hash

    return hash(tuple(tensor_hash(p.data.view(BITS[min(p.element_size(), 8)])) for p in parameters))


def register() -> None:
    """Register the hook."""
    target = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    require(f"{target}.update_weights_from_distributed", "self names dtypes shapes group_name load_format")
    HookRegistry.register(f"{target}.update_weights_from_distributed", take, HookType.AROUND)
