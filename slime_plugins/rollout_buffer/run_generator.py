"""Run one generator for the buffer of process PID, and end with it.

``python -m slime_plugins.rollout_buffer.run_generator MODULE PID``, the generator's data as JSON on stdin.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

from slime.observability.best_effort import output
from slime.rollout.rm_hub.worker_main import die_with_owner
from slime.servers.key_file import key_for
from slime.utils import run_key


def send_keys(data: dict[str, Any]) -> None:
    """Let all HTTP clients of this process, also the generator's own, send the keys of buffer and engines."""
    run_key.install()
    engine, buffer = data.get("remote_engine_url"), data.get("remote_buffer_url")
    if isinstance(engine, str):
        run_key.add(engine, data.get("engine_api_key"))
    if isinstance(buffer, str):
        run_key.add(buffer, key_for(buffer))


def main() -> None:
    die_with_owner(int(sys.argv[2]))
    sys.stdout, sys.stderr = (output(fd, "the generator's log", Path(f"/proc/self/fd/{fd}")) for fd in (1, 2))
    logging.basicConfig(level=logging.INFO)
    data = json.load(sys.stdin)
    send_keys(data)
    importlib.import_module(sys.argv[1]).run_rollout(data)


if __name__ == "__main__":
    main()
