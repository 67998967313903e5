"""The small version: ``python -m examples.adaptive_environments.run``."""

from __future__ import annotations

import sys

from examples.small_run import SmallExample

EXAMPLE = SmallExample(
    package="examples.adaptive_environments",
    what="Two environments in one run, sums and a hunt for a number, whose difficulty follows success.",
    data_sets=("addition", "hunt"),
    flags=(
        "--data-source-path=slime.rollout.environments.EnvironmentDataSource",
        "--environment-config=examples/adaptive_environments/environments.yaml",
    ),
    replaced={
        "--rollout-max-response-len": "60",
        "--rollout-batch-size": "48",
        "--kl-loss-coef": "0.03",
        "--lr": "3e-4",
    },
    rollouts=60,
    sft_rollouts=80,
)

if __name__ == "__main__":
    sys.exit(EXAMPLE.main())
