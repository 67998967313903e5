"""No generator: separate programs write the trajectories, such as ``python -m slime.agent.serve``."""

from __future__ import annotations

import threading
from typing import Any

TASK_TYPE = "external"


def run_rollout(data: dict[str, Any]) -> None:
    """Wait: the run ends this process, and so does the end of the buffer."""
    threading.Event().wait()
