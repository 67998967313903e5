"""Which router to start, and with which options."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, Literal

from slime.arguments.passthrough import catalog

RouterPackage = Literal["sglang_router", "smg"]

SMG_ONLY_POLICIES = frozenset({"prefix_hash", "least_load"})
"""sglang-router 0.3.2 does not know ``least_load``, and with ``prefix_hash`` it answers every request 503."""
LARGEST_WAIT_S = 14400


def choose_package(args: Namespace) -> RouterPackage:
    """Return ``smg`` when a policy needs it, else ``sglang_router`` (``smg`` when that is not installed).

    Raises:
        ValueError: the policy needs ``smg`` and it is not installed, or no router is.
    """
    policies = {args.router_policy, args.router_prefill_policy, args.router_decode_policy}
    needs_smg = sorted(SMG_ONLY_POLICIES & policies)
    has_smg = importlib.util.find_spec("smg") is not None
    if needs_smg and not has_smg:
        raise ValueError(
            f"--router-policy {needs_smg[0]} is offered by the router `smg` (pip install smg), which is not installed; "
            "sglang-router has random, round_robin, cache_aware, power_of_two, manual and consistent_hashing; the last "
            "two keep the requests with one X-SMG-Routing-Key on one engine."
        )
    if needs_smg or importlib.util.find_spec("sglang_router") is None:
        if not has_smg:
            raise ValueError("No router is installed: expected the package sglang-router (pip install sglang-router).")
        return "smg"
    return "sglang_router"


def router_fields(
    args: Namespace,
    *,
    host: str,
    port: int,
    prometheus_port: int | None = None,
    pd_disaggregation: bool = False,
    records: Sequence[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the fields of the router's ``RouterArgs``: the ``--router-*`` flags that were set, and what slime decides.

    The circuit breaker and the health check are off: slime watches its engines itself, and an engine that pauses for a
    weight update must not be taken off the router. ``records`` is the router's argument list; default: the installed
    one's.
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
    if prometheus_port is not None:
        fields["prometheus_port"] = prometheus_port
        fields.setdefault("prometheus_host", host)
    if pd_disaggregation:
        fields["pd_disaggregation"] = True
    api_key = args.sglang_api_key
    if api_key:
        fields["api_key"] = api_key
    return fields
