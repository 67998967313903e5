"""The router's flags (``--router-*``), with slime's defaults."""

from __future__ import annotations

from dataclasses import replace

from slime.arguments.flag import Flag
from slime.arguments.passthrough import catalog
from slime.arguments.passthrough.sglang import flag_of_record
from slime.arguments.passthrough.traits import with_traits

# The router has the first, though its own command line does not say so; smg, the successor with the same interface, has
# all of them, and the router's start says what is missing without it.
MORE_POLICIES = ("consistent_hashing", "prefix_hash", "least_load")
_ABOUT_POLICIES = (
    "Manual and consistent_hashing keep the requests of a sample, a group or one session (--sglang-routing-key) on one "
    "engine; prefix_hash and least_load need the router smg (pip install smg)"
)

_FLEET = "slime starts and registers its engines itself"
_WATCHED = "slime watches its engines itself; the router's own checks are off"
# Decided by slime for every router -> what to do instead.
OWNED: dict[str, str] = {
    "worker_urls": _FLEET,
    "router_prefill": _FLEET,
    "router_decode": _FLEET,
    "router_pd_disaggregation": "it follows from the kinds of engines",
    "router_request_timeout_secs": "give --sglang-router-request-timeout-secs",
    "router_api_key": "give --sglang-api-key",
    "router_cb_failure_threshold": _WATCHED,
    "router_cb_success_threshold": _WATCHED,
    "router_cb_timeout_duration_secs": _WATCHED,
    "router_cb_window_duration_secs": _WATCHED,
    "router_health_failure_threshold": _WATCHED,
    "router_health_success_threshold": _WATCHED,
    "router_health_check_timeout_secs": _WATCHED,
    "router_health_check_interval_secs": _WATCHED,
    "router_health_check_endpoint": _WATCHED,
}


def owned_options() -> dict[str, str]:
    """Option that is not offered (``--router-api-key``) -> what to do instead."""
    return {
        option: OWNED[record["dest"]]
        for record in catalog.records(catalog.ROUTER)
        if record["dest"] in OWNED
        for option in record["options"]
    }


def router_flags() -> list[Flag]:
    """Every flag of the installed router; its address is slime's own (``--sglang-router-ip`` and ``-port``)."""
    flags = []
    for record in catalog.records(catalog.ROUTER):
        if record["dest"] in OWNED:
            continue
        flag = flag_of_record(record, prefix="", source="router", group="router")
        if flag.dest == "router_policy" and flag.choices:
            choices = (*flag.choices, *(p for p in MORE_POLICIES if p not in flag.choices))
            flag = replace(flag, choices=choices, help=f"{flag.help}. {_ABOUT_POLICIES}")
        flags.append(with_traits(flag))
    return flags
