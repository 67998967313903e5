"""Engines and routers that serve any client, without trainer, prompts and rollouts: ``slime serve``."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import ray

from slime.arguments.args import Args
from slime.observability import run_dir
from slime.observability.best_effort import Files
from slime.observability.progress import Starting
from slime.ray import cluster, directories, space
from slime.ray.actors import worker
from slime.ray.driver.engines_command import table
from slime.ray.driver.placement_group import MANAGER_THREADS, create_placement_groups
from slime.ray.driver.program import handle_sigterm
from slime.ray.driver.rollout_handle import CONTROL_DEADLINE_S, DISPOSE_DEADLINE_S
from slime.ray.manager.engines.control import EngineControl, forwarded
from slime.ray.manager.engines.fleet import EngineFleet
from slime.ray.remote import Peer, reports_errors, wait_one
from slime.utils.run_state import record

if TYPE_CHECKING:
    from slime.ray.remote import RemoteActor

logger = logging.getLogger(__name__)

STATUS_INTERVAL_S = 2.0
DRAIN_MARGIN_S = 60.0
"""The time beyond ``--drain-timeout`` that draining may take: an engine may be slow to report its load."""


class ServingManager:
    """The Ray actor that holds the engines and routers. Engines are checked, and restarted when they are lost.

    When a model is left without engines for good, or a router is, ``wait_for_failure`` raises ``EngineDied``.
    """

    def __init__(self, args: Args) -> None:
        worker.begin(args, "serving")
        self.args = args
        self.engines = EngineControl(args, threading.Lock())

    @reports_errors
    def start(self, slots: tuple[Any, list[int], list[int]], wiring: dict[str, Any]) -> str | None:
        """Start the engines on ``slots``; return the key that they require, None where they require none."""
        self.engines.fleet = EngineFleet(self.args, slots, wiring, self.engines)
        self.engines.fleet.start()
        self.engines.ready.set()
        self.engines.health_monitoring_resume()
        key: str | None = self.args.sglang_api_key
        return key

    @reports_errors
    def drain(self, deadline_s: float) -> int:
        """Accept no more requests; return how many are in flight when all are answered or ``deadline_s`` is over."""
        return 0 if self.engines.fleet is None else self.engines.fleet.drain(deadline_s)

    def dispose(self) -> None:
        """End engines and routers."""
        self.engines.end_waits()
        if self.engines.fleet is not None:
            self.engines.fleet.stop()

    deployment = forwarded(EngineControl.deployment)
    add_engines = forwarded(EngineControl.add_engines)
    drain_engines = forwarded(EngineControl.drain_engines)
    remove_engines = forwarded(EngineControl.remove_engines)
    wait_for_failure = forwarded(EngineControl.wait_for_failure)


def serve(args: Args) -> NoReturn:
    """Start the deployment that ``args`` describe, show it, and keep it running until a signal ends it.

    SIGTERM and Ctrl-C drain it: engines are taken off their routers and get ``--drain-timeout`` seconds for the
    requests that they hold. A second signal skips that. Nothing of it is left afterwards.
    """
    directories.hold(args)
    path = run_dir.prepare(args)
    space.look(args)
    logger.info("run directory: %s", path)
    if args.sglang_config is not None:  # the manager reads it too, perhaps in another working directory
        record(args, sglang_config=os.path.abspath(args.sglang_config))
    peer = Peer("the serving manager", path / "logs" / "serving.log")
    start = Starting()
    manager: Any = None
    serves = False
    try:
        start.waits_for("Ray, and the slots of the engines")
        slots = create_placement_groups(args)["rollout"]
        handle_sigterm()  # Ray has put its own handler there
        start.waits_for("the engines and their routers")
        here = cluster.current()
        options = {"runtime_env": here.environment(), **here.whole_cpu(), **here.name_manager(path)}
        manager = ray.remote(ServingManager).options(max_concurrency=MANAGER_THREADS, **options).remote(args)
        failure = manager.wait_for_failure.remote()
        started = manager.start.remote(slots, here.wiring_of_engines())
        key = wait_one(started, peer, "starting the engines", 2 * args.engine_ready_timeout, [failure])
        serves = True
        start.done()
        if key is not None and key != args.sglang_api_key:
            hand_over_key(path / "api_key", key)
        _watch(manager, failure, peer, path / "serving.json")
    except KeyboardInterrupt:
        if serves:
            _drain(manager, peer, args.drain_timeout)
        raise
    finally:
        _end(manager, path / "serving.json")


def _watch(manager: RemoteActor, failure: object, peer: Peer, file: Path) -> NoReturn:
    """Show the deployment, on the terminal and in ``file``, whenever it has changed. Raises ``EngineDied``."""
    files = Files("what is served")
    shown: dict[str, Any] | None = None
    while True:
        asked = manager.deployment.remote()
        found = wait_one(asked, peer, "asking for the state of the engines", CONTROL_DEADLINE_S, [failure])
        if found != shown:
            files.write(file, (json.dumps({"models": found}, indent=2) + "\n").encode())
            with contextlib.suppress(OSError):  # a terminal that is gone, or a full disk
                print(table(found), flush=True)
            shown = found
        ray.wait([failure], timeout=STATUS_INTERVAL_S)


def hand_over_key(file: Path, key: str) -> None:
    """Write the key that was generated for servers that other hosts can reach where only this user can read it."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(key + "\n")
    logger.info("engines and routers require the API key in %s", file)


def _drain(manager: RemoteActor, peer: Peer, timeout_s: float) -> None:
    logger.info("draining: no more requests are accepted; those in flight have %g s (--drain-timeout)", timeout_s)
    left = wait_one(manager.drain.remote(timeout_s), peer, "draining the engines", timeout_s + DRAIN_MARGIN_S)
    if left:
        logger.warning("%d requests are not answered after %g s (--drain-timeout), and end now", left, timeout_s)


def _end(manager: RemoteActor | None, file: Path) -> None:
    """End every process of the deployment, in any state of it."""
    file.unlink(missing_ok=True)
    try:
        if manager is not None:
            ray.wait([manager.dispose.remote()], timeout=DISPOSE_DEADLINE_S)
    finally:
        if cluster.is_connected():
            cluster.current().shutdown()
        directories.release()
