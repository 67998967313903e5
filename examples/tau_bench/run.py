"""The small version: ``python -m examples.tau_bench.run``."""

from __future__ import annotations

import sys

from examples.small_run import SmallExample

EXAMPLE = SmallExample(
    package="examples.tau_bench",
    what="Customers of a shop: the model learns to look orders up, to ask, and to keep a policy.",
    data_sets=("orders", "questions"),
    targets={"orders": 0.7, "questions": 0.7},
    flags=(
        "--prompt-data={data}/train.jsonl",
        "--environment-config=examples/tau_bench/small.yaml",
    ),
    # A guess is right in one of four cases, so that looking an order up is worth less than in other examples.
    replaced={
        "--rollout-max-response-len": "90",
        "--rollout-batch-size": "32",
        "--kl-loss-coef": "0.03",
        "--lr": "4e-4",
    },
    rollouts=30,
    sft_rollouts=30,
)

if __name__ == "__main__":
    sys.exit(EXAMPLE.main())
