"""The small version: ``python -m examples.eval_multi_task.run``."""

from __future__ import annotations

import sys

from examples.small_run import SmallExample

EXAMPLE = SmallExample(
    package="examples.eval_multi_task",
    what="Sums and choices are trained; three data sets with rewards of their own are evaluated.",
    data_sets=("addition", "choice"),
    watched=("capitals",),
    flags=(
        "--prompt-data={data}/train.jsonl",
        "--label-key=label",
        "--rm-type=f1",
        "--apply-chat-template",
        "--eval-config={data}/eval.yaml",
        "--custom-eval-rollout-log-function-path=examples.eval_multi_task.rewards.log_best_of_n",
    ),
    generate="",
    replaced={"--kl-loss-coef": "0.1", "--rollout-batch-size": "64"},
    rollouts=50,
    sft_rollouts=80,
)

if __name__ == "__main__":
    sys.exit(EXAMPLE.main())
