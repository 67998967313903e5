"""Routers: one as a child process of the caller, with its options, and one that runs already."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import slime
from slime.arguments.args import Args
from slime.arguments.passthrough import catalog
from slime.backends.sglang_utils.errors import RouterStartError, with_last_lines
from slime.backends.sglang_utils.ports import looks_like_port_conflict, reserve_ports
from slime.servers.http import BlockingHttp, RouterError, RouterTimeoutError
from slime.servers.http_replies import engine_of
from slime.servers.types import EngineInfo
from slime.utils.network import join_address
from slime.utils.process_guard import GuardedProcess, spawn
from slime.utils.secrets import public_environment

logger = logging.getLogger(__name__)

RouterPackage = Literal["sglang_router", "smg"]

SMG_ONLY_POLICIES = frozenset({"prefix_hash", "least_load"})
"""sglang-router 0.3.2 does not know ``least_load``, and with ``prefix_hash`` it answers every request 503."""
LARGEST_WAIT_S = 14400
SMG_PATIENCE = ("worker_wedge_secs", "worker_stale_secs", "stream_body_stall_timeout_secs")
SMG_BALANCE: dict[str, Any] = {
    # Its load-aware policies send everything to the engine with the smallest load that they know of: with the default
    # of 10 s, to one engine for several short rollouts.
    "load_monitor_interval": 1,
    # A minute in which a new engine gets a quarter of its share: ours are registered when they are warm.
    "worker_warmup_secs": 0,
    # An engine where 8 requests wait gets none. slime lets more wait, so that no slot is ever empty, and limits them.
    "worker_overload_protection": False,
}
LAST_LINES = 30
PORT_ATTEMPTS = 3
READY_DEADLINE_S = 60.0
WORKER_DEADLINE_S = 60.0
_POLL_S = 0.1
_SOURCE_ROOT = str(Path(slime.__file__).parents[1])


class Router:
    """A router at ``host:port`` that answers: which engines it sends requests to."""

    name = "router"

    def __init__(self, args: Args, host: str, port: int | None) -> None:
        self.host, self.port = host, port
        self._api_key: str | None = args.sglang_api_key

    @property
    def url(self) -> str:
        """Base URL of the router."""
        return f"http://{join_address(self.host, int(self.port or 0))}"

    def add_engine(self, engine: EngineInfo, *, deadline_s: float = WORKER_DEADLINE_S) -> None:
        """Send requests to ``engine`` too; return when the router lists it as healthy.

        Raises ``RouterError`` when the router refuses, ``RouterTimeoutError`` when it does not within ``deadline_s``
        seconds.
        """
        add_worker(
            self.url,
            engine.url,
            worker_type=engine.worker_type,
            bootstrap_port=engine.bootstrap_port,
            engine_api_key=engine.api_key,
            api_key=self._api_key,
        )
        wait_worker_ready(self.url, engine.url, deadline_s=deadline_s, api_key=self._api_key)

    def restart(self) -> None:
        """Start it again after it has ended. Raises RouterStartError."""
        raise RouterStartError(f"the router at {self.url} was not started here")

    def remove_engine(self, engine: EngineInfo) -> bool:
        """Send no more requests to ``engine``; False when the router does not list it."""
        return remove_worker(self.url, engine.url, api_key=self._api_key)


class RunningRouter(Router):
    """A router that slime did not start (``--sglang-router-ip``, ``--sglang-router-port``) and will end.

    It has the verbs of :class:`RouterProcess`; engines that were added are taken off it again by :meth:`stop`, except
    engines that others started and had put there before.
    """

    def __init__(self, args: Args) -> None:
        super().__init__(args, args.sglang_router_ip, args.sglang_router_port)
        self._added: list[EngineInfo] = []
        self._found: set[str] = set()

    def start(self) -> None:
        """It runs already."""

    def wait_ready(self) -> None:
        """Raise RouterStartError unless the router answers."""
        try:
            list_workers(self.url, api_key=self._api_key)
        except RouterError as e:
            raise RouterStartError(
                f"no router answers at {self.url} (--sglang-router-ip, --sglang-router-port): {e}. Start it first, or "
                "leave the flags out and slime starts one"
            ) from e

    def add_engine(self, engine: EngineInfo, *, deadline_s: float = WORKER_DEADLINE_S) -> None:
        """See :meth:`Router.add_engine`."""
        if engine.life and find_workers(self.url, engine.url, api_key=self._api_key):
            self._found.add(engine.url)
            wait_worker_ready(self.url, engine.url, deadline_s=deadline_s, api_key=self._api_key)
            return
        if engine.url not in self._found:
            self._added.append(engine)
        super().add_engine(engine, deadline_s=deadline_s)

    def poll(self) -> str | None:
        """None: its life is not watched here; requests that it does not answer fail by themselves."""
        return None

    def stop(self) -> None:
        """Take this run's engines off the router."""
        while self._added:
            engine = self._added.pop()
            try:
                self.remove_engine(engine)
            except RouterError as e:
                logger.warning("engine %s stays on the router %s: %s", engine.url, self.url, e)


class RouterProcess(Router):
    """Start, watch and stop a router. It ends when this process ends, by SIGKILL too.

    ``port`` None is chosen at the start, and again when another process takes it first: ``url`` is final once
    :meth:`wait_ready` has returned. Engines are added and removed while it runs. ``shares_flags``: another router of
    the run has the ports that the flags name.
    """

    def __init__(
        self,
        args: Args,
        host: str,
        port: int | None = None,
        *,
        log_path: str | Path,
        name: str = "router",
        pd_disaggregation: bool = False,
        shares_flags: bool = False,
    ) -> None:
        super().__init__(args, host, port)
        self.args, self.name = args, name
        self.log_path = Path(log_path)
        self.package = choose_package(args, pd_disaggregation=pd_disaggregation)
        self._chooses_port = port is None
        self._pd_disaggregation = pd_disaggregation
        self._shares_flags = shares_flags
        self._process: GuardedProcess | None = None
        self._options: Path | None = None

    @property
    def pid(self) -> int | None:
        """Process id, None before the start."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the router and return at once."""
        if self._process is not None and self._process.poll() is None:
            raise RuntimeError(f"{self.name} runs already (pid {self.pid})")
        if self._chooses_port:
            self.port = reserve_ports(1)[0]
        # The default of the router package is one port for all runs of the host: only one that was asked for is kept.
        asked_for = "router_prometheus_port" in self.args.explicit_flags and not self._shares_flags
        prometheus_port = self.args.router_prometheus_port if asked_for else reserve_ports(1)[0]
        fields = router_fields(
            self.args,
            host=self.host,
            port=int(self.port or 0),
            prometheus_port=prometheus_port,
            pd_disaggregation=self._pd_disaggregation,
            package=self.package,
        )
        fd, options = tempfile.mkstemp(prefix="slime-router-", suffix=".json")
        with os.fdopen(fd, "w") as file:
            json.dump(fields, file)
        self._options = Path(options)
        command = [sys.executable, "-m", "slime.backends.sglang_utils.router_main", self.package, options]
        if not asked_for:
            command.append(str(prometheus_port))
        env = public_environment()
        env["PYTHONPATH"] = os.pathsep.join(p for p in (_SOURCE_ROOT, env.get("PYTHONPATH", "")) if p)
        self._process = spawn(command, env, self.log_path, self.name)
        logger.info("%s: %s, pid %d, %s, log %s", self.name, self.package, self._process.pid, self.url, self.log_path)

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S) -> None:
        """Return when the router answers.

        Raises:
            RouterStartError: it exited, or does not answer within ``deadline_s`` seconds. The message holds its last
                log
                lines; the process has been ended.
        """
        deadline = time.monotonic() + deadline_s
        attempts = 1
        while True:
            ended = self.poll()
            if ended is not None:
                if self._chooses_port and attempts < PORT_ATTEMPTS and looks_like_port_conflict(self.last_lines(300)):
                    logger.warning("%s: another process took port %s; starting again", self.name, self.port)
                    attempts += 1
                    self.stop()
                    self.start()
                    continue
                self.stop()
                raise RouterStartError(ended)
            try:
                # Another process on our port may accept the connection and never reply.
                list_workers(self.url, api_key=self._api_key, timeout=2.0)
            except RouterError as e:
                if time.monotonic() > deadline:
                    what = f"{self.name} at {self.url} does not answer after {deadline_s:g} s ({e})."
                    message = with_last_lines(what, self.log_path, self.last_lines())
                    self.stop()
                    raise RouterStartError(message) from e
                time.sleep(_POLL_S)
                continue
            self._remove_options()
            return

    def restart(self) -> None:
        """Start the router again on its port; see ``wait_ready``. It has no engines then."""
        self._chooses_port = False  # its address is known everywhere
        self.start()
        self.wait_ready()

    def poll(self) -> str | None:
        """Return None while the router runs, else what ended it, with its last log lines."""
        if self._process is None:
            return f"{self.name} has not been started."
        code = self._process.poll()
        if code is None:
            return None
        how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
        return with_last_lines(f"{self.name} (pid {self.pid}, {self.url}) {how}.", self.log_path, self.last_lines())

    def last_lines(self, n: int = LAST_LINES) -> list[str]:
        """Return the last ``n`` lines that the router has logged since its last start."""
        return self._process.last_lines(n) if self._process else []

    def stop(self, grace_s: float = 5.0) -> None:
        """End the router; nothing happens when it is not running."""
        if self._process is not None:
            self._process.stop(grace_s)
        self._remove_options()

    def _remove_options(self) -> None:
        if self._options is not None:
            self._options.unlink(missing_ok=True)
            self._options = None


def choose_package(args: Args, *, pd_disaggregation: bool = False) -> RouterPackage:
    """Return the package of ``--sglang-router-package``; of ``auto``, ``smg`` where it is installed.

    Not where clients ask through OpenAI's API (``slime serve``, the rollout buffer): smg answers 404 to every name of a
    model but the engines' own, and sglang-router sends them all on.

    Raises:
        ValueError: that router is not installed, or a policy, prefill and decode engines or --router-dp-aware need
            ``smg``.
    """
    has_smg, has_sglang_router = (importlib.util.find_spec(name) is not None for name in ("smg", "sglang_router"))
    asked = args.sglang_router_package
    if asked == "smg" and not has_smg:
        raise ValueError("--sglang-router-package smg: it is not installed (pip install smg).")
    if asked == "sglang_router" and not has_sglang_router:
        raise ValueError("--sglang-router-package sglang_router: it is not installed (pip install sglang-router).")
    names_models = has_sglang_router and (args.serve_only or args.rollout_buffer_url is not None)
    policies = {args.router_policy, args.router_prefill_policy, args.router_decode_policy}
    needs_smg = sorted(SMG_ONLY_POLICIES & policies)
    if has_smg and (asked == "smg" or (asked == "auto" and (needs_smg or args.router_dp_aware or not names_models))):
        return "smg"
    if needs_smg:
        why = "--sglang-router-package says otherwise" if has_smg else "which is not installed"
        raise ValueError(
            f"--router-policy {needs_smg[0]} is offered by the router `smg` (pip install smg), {why}; "
            "sglang-router has random, round_robin, cache_aware, power_of_two, manual and consistent_hashing; the last "
            "two keep the requests with one X-SMG-Routing-Key on one engine."
        )
    if pd_disaggregation:
        raise ValueError(
            "Prefill and decode engines need the router `smg` (pip install smg; --sglang-router-package auto): with "
            "sglang-router the requests of a decode engine that dies are never answered."
        )
    if args.router_dp_aware:
        raise ValueError(
            "--router-dp-aware needs the router `smg` (pip install smg; --sglang-router-package auto): sglang-router "
            "never removes an engine again whose data-parallel ranks it has listed."
        )
    if not has_sglang_router:
        raise ValueError("No router is installed: expected the package smg or sglang-router (pip install smg).")
    return "sglang_router"


def router_fields(
    args: Args,
    *,
    host: str,
    port: int,
    prometheus_port: int | None = None,
    pd_disaggregation: bool = False,
    package: RouterPackage = "sglang_router",
    records: Sequence[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the fields of the router's ``RouterArgs``: the ``--router-*`` flags that were set, and what slime decides.

    The circuit breaker and the health check are off: slime watches its engines itself, and an engine that pauses for a
    weight update must not be taken off the router. ``records`` is the router's argument list; default: the installed
    one's. ``smg`` also judges by load and progress which engines may get requests: a pause must not count as
    standing still, and all engines must get their share at once (``SMG_BALANCE``).
    """
    records = catalog.records(catalog.ROUTER) if records is None else records
    fields: dict[str, Any] = {}
    for record in records:
        attribute = record["dest"]
        if hasattr(args, attribute) and getattr(args, attribute) != record["default"]:
            fields[attribute.removeprefix("router_")] = getattr(args, attribute)
    fields.update(
        host=host,
        port=port,
        disable_circuit_breaker=True,
        disable_health_check=True,
        request_timeout_secs=int(args.sglang_router_request_timeout_secs or LARGEST_WAIT_S),
    )
    # Requests in flight do not hold up the end of a run.
    fields.setdefault("shutdown_grace_period_secs", 1)
    # A worker is ready when it answers; slime registers engines that are.
    fields.setdefault("worker_startup_check_interval", 1)
    if package == "smg":
        fields = {**SMG_BALANCE, **fields, **dict.fromkeys(SMG_PATIENCE, LARGEST_WAIT_S)}
    if prometheus_port is not None:
        fields["prometheus_port"] = prometheus_port
        fields.setdefault("prometheus_host", host)
    if pd_disaggregation:
        # A request that the router sends again has the same id, which the engine of its other half still knows (400);
        # slime's client sends it again with another.
        fields.update(pd_disaggregation=True, disable_retries=True)
    api_key = args.sglang_api_key
    if api_key:
        fields["api_key"] = api_key
    return fields


# Blocking control of a router over HTTP: which engines it sends requests to

_WORKER_POLL_S = 0.2
_TIMEOUT_S = 30.0
_REPLACE_DEADLINE_S = 20.0


def _http(router_url: str, api_key: str | None, timeout: float = _TIMEOUT_S) -> BlockingHttp:
    return BlockingHttp(
        router_url, api_key=api_key, timeout=timeout, error=RouterError, timeout_error=RouterTimeoutError
    )


def add_worker(
    router_url: str,
    engine_url: str,
    *,
    worker_type: str = "regular",
    bootstrap_port: int | None = None,
    engine_api_key: str | None = None,
    api_key: str | None = None,
) -> None:
    """Register an engine. The router answers at once and makes it ready later: see :func:`wait_worker_ready`.

    ``engine_api_key`` is the key that the router is to send to the engine, ``api_key`` the router's own.
    An earlier entry of the same URL is replaced (smg refuses another one, and removes them in the background).

    Raises:
        ValueError: a prefill worker without ``bootstrap_port``.
        RouterError: the router refused or cannot be reached.
    """
    body: dict[str, Any] = {"url": engine_url, "worker_type": worker_type}
    if worker_type == "prefill":
        if bootstrap_port is None:
            raise ValueError(f"Prefill worker {engine_url} has no bootstrap port; the router needs it.")
        body["bootstrap_port"] = bootstrap_port
    if engine_api_key:
        body["api_key"] = engine_api_key
    deadline = time.monotonic() + _REPLACE_DEADLINE_S
    while True:
        try:
            _http(router_url, api_key).post("/workers", body)
            return
        except RouterError as e:
            if e.status != 409 or time.monotonic() > deadline:
                raise
        remove_worker(router_url, engine_url, api_key=api_key)
        time.sleep(_WORKER_POLL_S)


def list_workers(router_url: str, *, api_key: str | None = None, timeout: float = _TIMEOUT_S) -> list[dict[str, Any]]:
    """Return the router's workers: each has at least ``id``, ``url`` and ``is_healthy``."""
    return list(_http(router_url, api_key, timeout).get("/workers").json()["workers"])


def find_workers(router_url: str, engine_url: str, *, api_key: str | None = None) -> list[dict[str, Any]]:
    """Return the router's entries of ``engine_url``: under --router-dp-aware one for every data-parallel rank."""
    wanted = engine_url.rstrip("/")
    return [w for w in list_workers(router_url, api_key=api_key) if engine_of(w["url"]).rstrip("/") == wanted]


def wait_worker_ready(
    router_url: str, engine_url: str, *, deadline_s: float = 60.0, api_key: str | None = None
) -> list[dict[str, Any]]:
    """Wait until the router lists ``engine_url``, with all its ranks, as healthy; return its entries.

    Raises:
        RouterTimeoutError: it does not within ``deadline_s`` seconds; the message shows the last entries seen.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        workers = find_workers(router_url, engine_url, api_key=api_key)
        if workers and len(workers) >= _ranks(workers[0]) and all(worker.get("is_healthy") for worker in workers):
            return workers
        if time.monotonic() > deadline:
            raise RouterTimeoutError(
                "GET",
                f"{router_url}/workers",
                status=200,
                body=f"worker {engine_url} is {workers or 'not listed'} after {deadline_s:g} s",
                hint="The router asks the engine for its health and model before it lists it; see both logs.",
            )
        time.sleep(_WORKER_POLL_S)


def remove_worker(router_url: str, engine_url: str, *, api_key: str | None = None) -> bool:
    """Take ``engine_url`` off the router; False when the router does not list it."""
    workers = find_workers(router_url, engine_url, api_key=api_key)
    for worker in workers:
        try:
            _http(router_url, api_key).delete(f"/workers/{worker['id']}")
        except RouterError as e:
            if e.status != 404:  # it has been removed since
                raise
    return bool(workers)


def _ranks(worker: dict[str, Any]) -> int:
    """Return how many entries the router makes of the engine of ``worker``."""
    return int(worker.get("dp_size", 1)) if engine_of(worker["url"]) != worker["url"] else 1
