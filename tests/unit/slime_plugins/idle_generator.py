"""A generator that writes nothing and does not end."""

from __future__ import annotations

import threading
from typing import Any

TASK_TYPE = "idle"


def run_rollout(data: dict[str, Any]) -> None:
    threading.Event().wait()
