"""Push the trainer's weights to the engines: HF-named buckets, one version number per push, verified.

Invariant: an engine reports version N only after it has loaded every bucket of push N. The number travels with the last
bucket, and ``update`` raises unless every engine answers with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.arguments.args import Args
from slime.weight_sync.fanout import WeightSyncError
from slime.weight_sync.updater import WeightUpdater

if TYPE_CHECKING:
    from slime.servers.engine_client import PauseMode
    from slime.weight_sync.transport import WeightSource

__all__ = ["WeightSyncError", "WeightUpdater", "create_updater", "resolve_pause_mode"]


def create_updater(args: Args, trainer: WeightSource, *, synchronous_loop: bool) -> WeightUpdater:
    """Return the updater that the flags ask for; call it on every trainer rank.

    Args:
        args: resolved arguments; ``colocate`` selects the tensor transport, otherwise a process group carries
            them, or with ``--update-weight-mode delta`` what changed of them, or with ``--update-weight-transport
            p2p`` every rank writes them.
        trainer: the rank's ``MegatronTrainer`` (its ``model`` is read, never written).
        synchronous_loop: True when nothing generates while weights are pushed; decides what ``--weight-sync-pause-mode
            auto`` means.

    With ``--lora-sync adapter`` the engines get adapters alone, and are not paused.
    """
    from slime.backends.megatron_utils.weights import describe_hf_weights
    from slime.weight_sync.adapters import AdapterTransport
    from slime.weight_sync.distributed import DistributedTransport
    from slime.weight_sync.in_place import InPlaceTransport
    from slime.weight_sync.p2p import P2PTransport
    from slime.weight_sync.quantized import quantizer_of
    from slime.weight_sync.tensor import TensorTransport
    from slime.weight_sync.transport import Transport

    if args.lora_rank and args.lora_sync == "adapter":
        return WeightUpdater(args, trainer, AdapterTransport(args), pause_mode=None)
    if (quantizer := quantizer_of(args)) is not None:
        # Raises on every rank where weights cannot be quantized, before they are gathered.
        for name, shape, _ in describe_hf_weights(trainer.model, args):
            quantizer.selects(name, shape)
    transport: Transport
    if args.colocate:
        transport = TensorTransport(args)
    elif args.update_weight_transport == "p2p":
        transport = P2PTransport(args, trainer)
    else:
        transport = InPlaceTransport(args) if args.update_weight_mode == "delta" else DistributedTransport(args)
    return WeightUpdater(args, trainer, transport, pause_mode=resolve_pause_mode(args, synchronous_loop))


def resolve_pause_mode(args: Args, synchronous_loop: bool) -> PauseMode:
    """Return ``abort``, ``retract`` or ``in_place``.

    ``auto`` aborts in the synchronous loops, where a request in flight is a leftover, and retracts in the overlapped
    ones, where requests in flight must survive: retracted requests keep their tokens, lose their key-value cache, and
    continue under the new weights. Engines that others started abort there too, and the requests are sent again with
    the tokens that they had: such engines may lack slime's plug-in, without which they cannot flush what waits.

    Raises:
        WeightSyncError: for ``in_place`` with a prefix cache, which cannot be flushed while requests hold it: prompts
            cached before a push would keep the old weights' values after it.
    """
    mode = args.weight_sync_pause_mode
    if mode == "auto":
        return "abort" if synchronous_loop or args.rollout_external else "retract"
    if mode == "in_place" and not args.sglang_disable_radix_cache:
        raise WeightSyncError(
            "--weight-sync-pause-mode in_place leaves the engines' prefix cache with values of the old weights: add "
            "--sglang-disable-radix-cache, or choose retract (requests in flight survive and the cache is flushed)."
        )
    return mode
