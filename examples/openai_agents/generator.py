"""The generator of the rollout buffer: a gateway before the run's engines, and the agent that uses it.

    python -m slime_plugins.rollout_buffer.buffer --generator examples.openai_agents.generator

The buffer starts it when the run asks for its first rollout, and it ends with the buffer, as do gateway and agent.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.openai_agents.tasks import agent_command, task_line
from examples.services import ROOT, Service, Services
from slime.agent.serve import ENGINE_KEY_VARIABLE
from slime.servers.key_file import KEY_VARIABLE, shared_key
from slime.utils.data import read_file
from slime.utils.network import find_available_port

logger = logging.getLogger(__name__)

TASK_TYPE = "openai_agents"
FIRST_PORT = 18_100


def lines(data: dict[str, Any]) -> Iterator[str]:
    """Yield the agent's tasks: every row of every epoch, without those whose groups the run has fetched before."""
    skipped = Counter(map(str, data["skip_instance_ids"]))
    for _ in range(int(data["num_epoch"])):
        for number, row in enumerate(read_file(data["input_file"])):
            if skipped[str(number)]:
                skipped[str(number)] -= 1
                continue
            yield task_line(row, data["input_key"], data["label_key"], str(number), int(data["num_repeat_per_sample"]))


def gateway(data: dict[str, Any], port: int) -> Service:
    """Return the gateway of the run's engines, which writes to its buffer."""
    command = ["python", "-m", "slime.agent.serve", "--engine", data["remote_engine_url"], "--port", str(port),
               "--sink", data["remote_buffer_url"], "--hf-checkpoint", data["tokenizer_path"]]  # fmt: skip
    if parser := os.environ.get("AGENT_TOOL_CALL_PARSER"):
        command += ["--tool-call-parser", parser]
    return Service("gateway", tuple(command), f"http://127.0.0.1:{port}/healthz", start_s=300.0)


def run_rollout(data: dict[str, Any]) -> None:
    """Feed the agent until the tasks are used up. Raises RuntimeError when the agent or the gateway fails."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leave the blocks below
    if key := data.get("engine_api_key"):
        os.environ[ENGINE_KEY_VARIABLE] = key
    os.environ[KEY_VARIABLE] = shared_key()  # gateway and agent know it from here
    asked = dict(data["sampling_params"])
    params = {"max_new_tokens": asked.pop("max_tokens"), **asked}
    port = find_available_port(FIRST_PORT)
    with tempfile.TemporaryDirectory(prefix="slime-agents-") as logs:
        agent = subprocess.Popen(
            agent_command(f"http://127.0.0.1:{port}", params), cwd=ROOT, stdin=subprocess.PIPE, text=True
        )
        try:
            # the agent imports its packages while the gateway starts; it asks nothing before its first task
            # the end is that of the buffer: requests of the gateway have nowhere to go
            with Services([gateway(data, port)], Path(logs), grace_s=0.1) as services:
                assert agent.stdin is not None
                try:
                    for line in lines(data):
                        agent.stdin.write(line)
                    agent.stdin.close()
                except BrokenPipeError:
                    logger.error("the agent ended before it had read all tasks")
                code = agent.wait()
                if code:
                    raise RuntimeError(services.failure or f"the agent ended with exit status {code}")
        finally:
            agent.kill()
