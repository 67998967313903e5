"""Blocking control of a router: which engines it sends requests to."""

from __future__ import annotations

import time
from typing import Any

from slime.servers.http import BlockingHttp, RouterError, RouterTimeoutError
from slime.servers.http_replies import engine_of

_POLL_S = 0.2
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
        time.sleep(_POLL_S)


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
        time.sleep(_POLL_S)


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
