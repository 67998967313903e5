"""Health checks of engines."""

from __future__ import annotations

from slime.arguments.group import ArgumentGroup, flag


class FaultTolerance(ArgumentGroup):
    """Health checks and restarts."""

    title = "fault tolerance"

    use_fault_tolerance: bool = flag(
        False, "check the health of engines and restart those that fail before the next weight sync"
    )
    rollout_health_check_interval: float = flag(30.0, "seconds between two health checks of the engines", gt=0)
    rollout_health_check_timeout: float = flag(30.0, "seconds one health check may take", gt=0)
    rollout_health_check_first_wait: float = flag(0.0, "seconds after engines resume before they are checked", ge=0)
