"""HTTP helpers that rollout code and plugins import by name."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from typing import Any

from slime.arguments.args import Args
from slime.servers.http_client import HttpClient, HttpRequestError, HttpTimeoutError, StreamLostError
from slime.utils.declared import with_defaults
from slime.utils.network import (
    _wrap_ipv6,
    connection_limit,
    find_available_port,
    get_host_info,
    is_port_available,
    join_address,
)

__all__ = [
    "HttpClient",
    "HttpRequestError",
    "HttpTimeoutError",
    "StreamLostError",
    "_wrap_ipv6",
    "find_available_port",
    "get",
    "get_host_info",
    "get_http_client",
    "get_rollout_num_engines",
    "init_http_client",
    "is_port_available",
    "post",
    "run_router",
    "terminate_process",
]

DEFAULT_CONCURRENCY = 256
"""Connections of the client that is made when a request is sent before ``init_http_client``."""

_http_client: HttpClient | None = None


def get_rollout_num_engines(args: Args) -> int:
    """Return the number of engines: ``rollout_num_engines`` if set, else as the GPUs allow; 0 without rollout GPUs."""
    args = with_defaults(args)
    if args.rollout_num_engines is not None:
        return int(args.rollout_num_engines)
    if not args.rollout_num_gpus:
        return 0
    return max(1, args.rollout_num_gpus // args.rollout_num_gpus_per_engine)


def init_http_client(args: Args) -> None:
    """Create the process's client, with as many connections to a server as requests may be in flight.

    Reads ``sglang_server_concurrency``, the engine counts, ``rollout_request_timeout`` (s) and the engines' API key.
    Does nothing without engines.
    """
    args = with_defaults(args)
    global _http_client
    engines = get_rollout_num_engines(args)
    if not engines:
        return
    key = args.sglang_api_key or args.sglang_admin_api_key
    concurrency = connection_limit(args.sglang_server_concurrency * engines)
    _http_client = HttpClient(concurrency, args.rollout_request_timeout, key)
    routers = list((getattr(args, "sglang_model_routers", None) or {}).values())
    if args.sglang_router_ip:
        routers.append((args.sglang_router_ip, args.sglang_router_port))
    for host, port in routers:
        _http_client.trust(f"http://{join_address(host, port)}")


def get_http_client() -> HttpClient:
    """Return the process's client, making one with default limits when none was initialized."""
    global _http_client
    if _http_client is None:
        _http_client = HttpClient(DEFAULT_CONCURRENCY)
    return _http_client


async def post(
    url: str,
    payload: Mapping[str, Any] | None,
    max_retries: int = 60,
    headers: Mapping[str, str] | None = None,
    *,
    timeout: float | None = None,
) -> Any:
    """POST ``payload`` as JSON through the process's client; see ``HttpClient.post`` for retries and errors.

    A cancelled ``/generate`` is aborted on the engines.
    """
    return await get_http_client().post(url, payload, max_retries=max_retries, headers=headers, timeout=timeout)


async def get(url: str, *, timeout: float = 60.0) -> Any:
    """GET ``url`` once through the process's client; return JSON or text. Raises HttpRequestError."""
    return await get_http_client().get(url, timeout=timeout)


def run_router(args: Args) -> None:
    """Serve a router in this process until it ends; the target of a router child process. ``args`` is a RouterArgs."""
    from sglang_router.launch_router import launch_router

    if launch_router(args) is None:
        raise RuntimeError(f"the router on {getattr(args, 'host', '?')}:{getattr(args, 'port', '?')} did not start")


def terminate_process(process: multiprocessing.Process, timeout: float = 1.0) -> None:
    """Terminate ``process``, and kill it when it is still there after ``timeout`` s."""
    if not process.is_alive():
        return
    process.terminate()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join(timeout)
