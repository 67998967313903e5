"""The steps of a weight push that are calls to the engines, for every transport."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from slime.arguments.args import Args
from slime.servers.engine_client import EngineClient, PauseMode
from slime.servers.types import EngineInfo
from slime.weight_sync.fanout import FanOut, WeightSyncError

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 30.0


class Copier(Protocol):
    """The processes of an engine, which copy files to its hosts."""

    def pull_weights(self, directory: str, deadline_s: float) -> str: ...


class Member(Protocol):
    """An engine that loads weights from files."""

    @property
    def known_info(self) -> EngineInfo: ...

    @property
    def engine(self) -> Copier: ...


def health_check(control: FanOut, timeout: float) -> None:
    """Return when every server responds."""
    timeout = min(HEALTH_TIMEOUT_S, timeout)
    control.call("reach the server", lambda c: c.health(timeout), timeout)


def pause_and_flush(control: FanOut, pause_mode: PauseMode, timeout: float) -> None:
    """Stop every engine and empty its prefix cache, which was computed with the old weights."""
    control.call(f"pause ({pause_mode})", lambda c: c.pause(pause_mode), timeout)
    # In-place pauses keep the cache for the requests they hold.
    if pause_mode != "in_place":
        control.call("flush the prefix cache", lambda c: c.flush_cache(timeout), timeout)


def verify_and_continue(control: FanOut, version: int, timeout: float) -> None:
    """Resume every engine. Raises WeightSyncError, and they stay paused, unless all report ``version``."""
    verify(control, version, timeout)
    resume(control, timeout)


def verify(control: FanOut, version: int, timeout: float) -> None:
    """Raise WeightSyncError unless all engines report ``version``."""
    seen = control.call("read the weight version", lambda c: c.weight_version(), timeout)
    wrong = [
        f"{client.url} reports {got!r}"
        for client, got in zip(control.clients, seen, strict=True)
        if got != str(version)
    ]
    if wrong:
        raise WeightSyncError(
            f"After pushing weight version {version}: {'; '.join(wrong)}. The push did not arrive whole; "
            "engines that were paused stay so. See the engines' logs under the run directory."
        )
    logger.info("Weight version %d is on %d engines.", version, len(seen))


def resume(control: FanOut, timeout: float) -> None:
    """Let every engine continue."""
    control.call("continue", lambda c: c.resume(), timeout)


def load_files(args: Args, members: Sequence[Member], directory: str, version: int, *, pause_mode: PauseMode) -> None:
    """Let every engine load the checkpoint in ``directory`` and report ``version``.

    With ``--update-weight-local-checkpoint-dir`` each host copies and verifies it first, while the engines generate.
    Then: pause, flush, load, verify, continue. Raises WeightSyncError naming the engines that failed or are late; all
    of them stay paused then.
    """
    timeout = float(args.weight_sync_timeout)
    clients = [EngineClient.of(member.known_info, timeout) for member in members]
    member_of = dict(zip(clients, members, strict=True))
    paths = dict.fromkeys(clients, directory)
    control = FanOut(clients)
    try:
        health_check(control, timeout)
        if args.update_weight_local_checkpoint_dir is not None:
            copies = control.call(
                f"copy {directory} to its host", lambda c: member_of[c].engine.pull_weights(directory, timeout), timeout
            )
            paths = dict(zip(clients, copies, strict=True))
        pause_and_flush(control, pause_mode, timeout)
        hint = " (a path that their hosts must share with the trainers)" if args.rollout_external else ""
        control.call(
            f"load {directory}{hint}",
            lambda c: c.update_weights_from_disk(paths[c], flush_cache=False, weight_version=str(version)),
            timeout,
        )
        verify_and_continue(control, version, timeout)
    finally:
        control.close()
