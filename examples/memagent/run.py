"""The small version: ``python -m examples.memagent.run``."""

from __future__ import annotations

import sys

from examples.small_run import SmallExample

EXAMPLE = SmallExample(
    package="examples.memagent",
    what="A digit somewhere in a document that is read chunk by chunk: the model learns to remember.",
    data_sets=("chunks_3", "chunks_16"),
    targets={"chunks_3": 0.8, "chunks_16": 0.6},
    flags=(
        "--prompt-data={data}/train.jsonl",
        "--label-key=label",
        "--custom-config-path=examples/memagent/small.yaml",
        "--custom-rm-path=examples.memagent.rollout.reward_func",
        "--custom-eval-rollout-log-function-path=examples.memagent.rollout.eval_log",
        "--calculate-per-token-loss",
        "--disable-grpo-std-normalization",
    ),
    generate="examples.memagent.rollout.generate",
    control="examples.executions.shuffled_rewards",
    replaced={
        "--rollout-max-response-len": "10",
        "--rollout-batch-size": "64",
        "--kl-loss-coef": "0.003",
        "--lr": "6e-4",
        "--num-steps-per-rollout": "4",
        "--n-samples-per-eval-prompt": "2",
    },
    rollouts=20,
    sft_rollouts=75,  # with fewer it does not learn to tell the letters from each other
)

if __name__ == "__main__":
    sys.exit(EXAMPLE.main())
