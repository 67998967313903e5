"""Run one generator for the buffer of process PID, and end with it.

``python -m slime_plugins.rollout_buffer.run_generator MODULE PID``, the generator's data as JSON on stdin.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys

from slime.rollout.rm_hub.worker_main import die_with_owner


def main() -> None:
    die_with_owner(int(sys.argv[2]))
    logging.basicConfig(level=logging.INFO)
    data = json.load(sys.stdin)
    importlib.import_module(sys.argv[1]).run_rollout(data)


if __name__ == "__main__":
    main()
