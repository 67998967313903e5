"""Generators that misbehave."""

from __future__ import annotations

import sys
from typing import Any

TASK_TYPE = "breaks"


def run_rollout(data: dict[str, Any]) -> None:
    print("nothing works here", file=sys.stderr)
    sys.exit(3)
