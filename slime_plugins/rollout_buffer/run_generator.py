"""Run one generator: ``python -m slime_plugins.rollout_buffer.run_generator MODULE``, its data as JSON on stdin."""

from __future__ import annotations

import importlib
import json
import logging
import sys


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    data = json.load(sys.stdin)
    importlib.import_module(sys.argv[1]).run_rollout(data)


if __name__ == "__main__":
    main()
