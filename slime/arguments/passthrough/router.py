"""The router's flags (``--router-*``), with slime's defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime.arguments.flag import Flag
from slime.arguments.passthrough import catalog
from slime.arguments.passthrough.sglang import flag_of_record

DEFAULTS: dict[str, Any] = {
    "router_log_level": "warn",
    "router_balance_abs_threshold": 10,
    "router_balance_rel_threshold": 1.2,
}
# smg, the successor with the same interface, has these policies; the router's start says what is missing without it.
MORE_POLICIES = ("consistent_hashing", "prefix_hash", "least_load")


def router_flags() -> list[Flag]:
    """Every flag of the installed router; its address is slime's own (``--sglang-router-ip`` and ``-port``)."""
    return [_adjusted(_flag(record)) for record in catalog.records(catalog.ROUTER)]


def _flag(record: dict[str, Any]) -> Flag:
    return flag_of_record(record, prefix="", source="router", group="router")


def _adjusted(flag: Flag) -> Flag:
    if flag.dest == "router_policy" and flag.choices:
        flag = replace(flag, choices=(*flag.choices, *(p for p in MORE_POLICIES if p not in flag.choices)))
    return replace(flag, default=DEFAULTS.get(flag.dest, flag.default))
