"""Health checks of engines."""

from __future__ import annotations

from slime.arguments.group import ArgumentGroup, flag


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
