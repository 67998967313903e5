"""Let trainers write into the parameters of an engine (``--update-weight-transport p2p``): the engine's half.

A request for a process group whose backend is one of ours makes a rank meet the trainer in a store: it learns which
tensors are sent, finds out where its model puts them, lets the trainer's agents write there, and says where that is.
After the writes a request for a broadcast over that group, which carries the version, makes it compare checksums.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime.weights.delta.codec import checksum
from slime.weights.p2p import rendezvous
from slime.weights.p2p.agents import Agent, make_agent
from slime.weights.p2p.plan import Piece, RefusedError, trace
from slime_engine_plugin.hook_points import require

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    from slime.weights.p2p.plan import LoadableModel

logger = logging.getLogger(__name__)

MEETING_DEADLINE_S = 60.0


@dataclass
class Channel:
    """Connection of a rank to the trainer. ``rank`` is counted over all engines; ``trainers`` write.

    ``memory`` is what they write to: even if the model gave it up, it must not become that of something else.
    """

    store: rendezvous.Store
    agent: Agent
    pieces: Sequence[Piece]
    memory: Sequence[torch.UntypedStorage]
    rank: int
    trainers: int


_channels: dict[str, Channel] = {}
"""By the name of the group."""


def join(
    original: Callable[..., tuple[bool, str]],
    updater: WeightUpdater,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str = "nccl",
) -> tuple[bool, str]:
    """Around ``WeightUpdater.init_weights_update_group``; ``world_size`` is the number of trainer ranks for ours."""
    if not backend.startswith(rendezvous.BACKEND):
        return original(updater, master_address, master_port, rank_offset, world_size, group_name, backend)

    def meet() -> None:
        close(group_name)  # of a trainer that has ended
        store = dist.TCPStore(
            master_address, master_port, is_master=False, timeout=timedelta(seconds=MEETING_DEADLINE_S)
        )
        _channels[group_name] = open_channel(
            updater.get_model(),
            store,
            backend.removeprefix(rendezvous.BACKEND),
            rank_offset + updater.tp_rank,
            world_size,
        )

    return _everywhere(meet)


def open_channel(model: LoadableModel, store: rendezvous.Store, backend: str, rank: int, trainers: int) -> Channel:
    """Answer the trainer. Raises RefusedError where it cannot write to ``model``, ImportError without ``backend``."""
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise RefusedError("the engine's parameters are not in host memory")
    pieces = trace(model, rendezvous.get(store, rendezvous.TENSORS))
    written = {piece.parameter for piece in pieces}
    parameters = {name: tensor for name, tensor in _named(model).items() if name in written}
    agent = make_agent(backend)
    storages = {name: tensor.untyped_storage() for name, tensor in parameters.items()}
    agent.register(((storage.data_ptr(), storage.nbytes()) for storage in storages.values()), storages)
    places = {
        name: (storages[name].data_ptr(), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in parameters.items()
    }
    rendezvous.put_rank(store, rank, rendezvous.EngineRank(agent.address(), places, pieces))
    return Channel(store, agent, pieces, list(storages.values()), rank, trainers)


def confirm(
    original: Callable[..., tuple[bool, str]],
    updater: WeightUpdater,
    names: object,
    dtypes: object,
    shapes: object,
    group_name: str,
    load_format: str | None = None,
) -> tuple[bool, str]:
    """Around ``WeightUpdater.update_weights_from_distributed``: compare checksums."""
    channel = _channels.get(group_name)
    if channel is None:
        return original(updater, names, dtypes, shapes, group_name, load_format)
    return _everywhere(lambda: compare(updater.get_model(), channel))


def compare(model: torch.nn.Module, channel: Channel) -> None:
    """Raise RefusedError unless the parameters are what the trainer ranks report to have written."""
    expected: dict[int, str] = {}
    for trainer in range(channel.trainers):
        sums = rendezvous.get(channel.store, rendezvous.sums_key(trainer, channel.rank))
        expected |= {int(number): one for number, one in sums.items()}
    parameters = _named(model)
    wrong = []
    for number, piece in enumerate(channel.pieces):
        content = piece.unpack(parameters[piece.parameter])
        if checksum(content.numpy(), rendezvous.CHECKSUM) != expected.get(number):
            wrong.append(piece.parameter)
    if wrong:
        raise RefusedError(
            f"{len(wrong)} of {len(channel.pieces)} blocks of parameters are not what the trainer has written, the "
            f"first in {wrong[0]}"
        )


def leave(original: Callable[..., tuple[bool, str]], updater: WeightUpdater, group_name: str) -> tuple[bool, str]:
    """Around ``WeightUpdater.destroy_weights_update_group``."""
    if group_name not in _channels:
        return original(updater, group_name)
    close(group_name)
    return True, "Success"


def close(group_name: str) -> None:
    """Close the channel of the group, so that no trainer rank can write any more."""
    channel = _channels.pop(group_name, None)
    if channel is not None:
        channel.agent.close()


def _named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.data for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _everywhere(step: Callable[[], None]) -> tuple[bool, str]:
    """Do ``step`` on all tensor-parallel ranks; return whether it went well on all, and what did not."""
    from sglang.srt.distributed import get_tp_group

    why = None
    try:
        step()
    except Exception as e:  # noqa: BLE001  (the scheduler keeps running, and the trainer gets the reason)
        logger.warning("p2p: %s: %s", type(e).__name__, e)
        why = str(e) if isinstance(e, RefusedError) else f"{type(e).__name__}: {e}"
    group = get_tp_group()
    reasons = [why]
    if group.world_size > 1:
        reasons = [None] * group.world_size
        dist.all_gather_object(reasons, why, group=group.cpu_group)
    found = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    return (False, f"--update-weight-transport p2p: {'; '.join(found)}") if found else (True, "Success")


def register() -> None:
    """Register the hooks."""
    target = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    for method, parameters, hook in (
        (
            "init_weights_update_group",
            "self master_address master_port rank_offset world_size group_name backend",
            join,
        ),
        ("update_weights_from_distributed", "self names dtypes shapes group_name load_format", confirm),
        ("destroy_weights_update_group", "self group_name", leave),
    ):
        require(f"{target}.{method}", parameters)
        HookRegistry.register(f"{target}.{method}", hook, HookType.AROUND)
