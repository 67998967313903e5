"""Weights through files: the engines' half. It needs no trainers, which may have ended (``--release-train``)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from slime.ray.engines.members import Member
from slime.servers.engine_client import EngineClient


def load_weights(
    args: Namespace, members: Sequence[Member], directory: str, version: int, *, synchronous_loop: bool
) -> None:
    """Let every engine load the checkpoint in ``directory`` and report ``version``.

    With ``--update-weight-local-checkpoint-dir`` each host copies and verifies it first, while the engines generate.
    Then: pause, flush, load, verify, continue. Raises WeightSyncError naming the engines that failed or are late; all
    of them stay paused then.
    """
    from slime.weight_sync import resolve_pause_mode, steps
    from slime.weight_sync.fanout import FanOut

    timeout = float(args.weight_sync_timeout)
    infos = [member.known_info for member in members]
    clients = [EngineClient(info.url, api_key=info.api_key, timeout=timeout) for info in infos]
    member_of = dict(zip(clients, members, strict=True))
    paths = dict.fromkeys(clients, directory)
    control = FanOut(clients)
    try:
        steps.greet(control, timeout)
        if args.update_weight_local_checkpoint_dir is not None:
            copies = control.call(
                f"copy {directory} to its host", lambda c: member_of[c].engine.pull_weights(directory, timeout), timeout
            )
            paths = dict(zip(clients, copies, strict=True))
        steps.pause_and_flush(control, resolve_pause_mode(args, synchronous_loop), timeout)
        control.call(
            f"load {directory}",
            lambda c: c.update_weights_from_disk(paths[c], flush_cache=False, weight_version=str(version)),
            timeout,
        )
        steps.verify_and_continue(control, version, timeout)
    finally:
        control.close()
