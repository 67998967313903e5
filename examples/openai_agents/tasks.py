"""Input of the agent's process: its command line, and a line for each task."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def agent_command(gateway: str, sampling_params: Mapping[str, Any]) -> list[str]:
    """Return the command of an agent whose sessions have ``sampling_params`` of the engine; it reads tasks."""
    params = json.dumps({name: value for name, value in sampling_params.items() if value is not None})
    return [sys.executable, "-m", "examples.openai_agents.agent", "--gateway", gateway, "--sampling-params", params]


def task_line(row: Mapping[str, Any], input_key: str, label_key: str, instance_id: str, attempts: int) -> str:
    """Return the line of a row of the data, whose prompt is a text or ends with a message of the user."""
    prompt = row[input_key]
    question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    task = {"instance_id": instance_id, "question": question, "label": row[label_key], "attempts": attempts}
    return json.dumps(task) + "\n"
