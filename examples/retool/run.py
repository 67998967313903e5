"""The small version: ``python -m examples.retool.run``."""

from __future__ import annotations

import sys

from examples.small_run import SmallExample

EXAMPLE = SmallExample(
    package="examples.retool",
    what="Products of three numbers: the model learns to use an interpreter.",
    data_sets=("products",),
    targets={"products": 0.8},
    flags=(
        "--prompt-data={data}/train.jsonl",
        "--label-key=label",
        "--environment-config=examples/retool/small.yaml",
        "--rollout-stop=</code>",
    ),
    replaced={"--rollout-max-response-len": "100", "--rollout-batch-size": "32", "--kl-loss-coef": "0.03"},
    rollouts=20,
)

if __name__ == "__main__":
    sys.exit(EXAMPLE.main())
