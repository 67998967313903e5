"""Engines that end, that join and leave while a run is in progress, and that others started."""

from __future__ import annotations

from slime.arguments.group import ArgumentGroup, DottedPath, flag


class FaultTolerance(ArgumentGroup):
    """Health checks and restarts."""

    title = "fault tolerance"

    use_fault_tolerance: bool = flag(
        False,
        "check the health of engines, and start those again that have ended or stopped answering; they serve from the "
        "next weight sync on",
    )
    rollout_health_check_interval: float = flag(30.0, "seconds between two health checks of the engines", gt=0)
    rollout_health_check_timeout: float = flag(30.0, "seconds one health check may take", gt=0)
    rollout_health_check_first_wait: float = flag(
        0.0, "seconds after the start of a rollout, where checks have paused, before the engines are checked", ge=0
    )
    rollout_health_check_failures: int = flag(
        3, "so many health checks in a row must fail before an engine is ended and started again", ge=2
    )


class ElasticEngines(ArgumentGroup):
    """How many engines there may be, and who decides."""

    title = "elastic engines"

    rollout_min_engines: int = flag(1, "so many engines of a model stay when engines are removed", ge=1)
    rollout_max_engines: int | None = flag(
        None,
        "so many engines may a model have when engines are added; default: as many as the Ray cluster has room for",
        ge=1,
    )
    custom_engine_scaling_path: DottedPath | None = flag(
        None,
        "dotted path of your own function that says how many engines each model is to have, within "
        "--rollout-min-engines and --rollout-max-engines",
    )
    engine_scaling_interval: float = flag(30.0, "seconds between two calls of that function", gt=0)


class ExternalEngines(ArgumentGroup):
    """Engines started elsewhere."""

    title = "external engines"

    rollout_external_engine_addrs: list[str] | None = flag(
        None, "addresses (host:port or http://host:port) of engines started elsewhere"
    )
