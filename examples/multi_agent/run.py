"""The small version: ``python -m examples.multi_agent.run``."""

from __future__ import annotations

import sys

from examples.small_run import SmallExample

EXAMPLE = SmallExample(
    package="examples.multi_agent",
    what="Two solvers, two rewriters and a selector learn to add together.",
    data_sets=("sums",),
    flags=(
        "--prompt-data={data}/train.jsonl",
        "--label-key=label",
        "--rm-type=f1",
        "--custom-config-path=examples/multi_agent/small.yaml",
        "--custom-rollout-log-function-path=examples.multi_agent.rollout_with_multi_agents.log_agents",
    ),
    generate="examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents",
    replaced={
        "--rollout-max-response-len": "16",
        "--rollout-batch-size": "32",
        "--kl-loss-coef": "0.05",
        "--n-samples-per-eval-prompt": "2",
    },
    rollouts=30,
)

if __name__ == "__main__":
    sys.exit(EXAMPLE.main())
