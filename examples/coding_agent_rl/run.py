"""The small version: ``python -m examples.coding_agent_rl.run``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from examples.quickstart.recipe import Paths
from examples.small_run import SmallExample

VARIABLES = {
    "SWE_AGENT": "operator",
    "SWE_SANDBOX": "local",
    "SWE_CC_PROMPT": "{problem_statement}",
    "SWE_AGENT_TIME_BUDGET_SEC": "120",
    "SWE_EVAL_TIMEOUT_SEC": "60",
    "ADAPTER_PORT": "0",
}


@contextlib.contextmanager
def variables(paths: Paths) -> Iterator[list[str]]:
    """Set the variables that the processes of the run read."""
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(VARIABLES)
    try:
        yield []
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


EXAMPLE = SmallExample(
    package="examples.coding_agent_rl",
    what="Repositories with a wrong operator, which an agent replaces in a sandbox.",
    data_sets=("tasks",),
    targets={"tasks": 0.8},
    flags=("--prompt-data={data}/train.jsonl",),
    generate="examples.coding_agent_rl.generate.generate",
    service=variables,
    replaced={
        "--rollout-batch-size": "8",
        "--rollout-max-response-len": "4",
        "--lr": "7e-4",
        "--lr-decay-style": "constant",
        "--kl-loss-coef": "0.2",
        "--n-samples-per-eval-prompt": "1",
    },
    rollouts=20,
    warmup_steps=4,
)

if __name__ == "__main__":
    sys.exit(EXAMPLE.main())
