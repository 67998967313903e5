"""The small version: ``python -m examples.delta_weight_sync.run``."""

from __future__ import annotations

import sys
from typing import Any

from examples.small_run import SmallExample


class DeltaExample(SmallExample):
    """Tells of every push what was written for it."""

    def describe(self, row: dict[str, Any]) -> str | None:
        if row["name"] == "perf/update_weights_density":
            return f"rollout {row['step']:3d}: {row['value']:.1%} of the weights' bytes were pushed as changed"
        if row["name"] == "perf/update_weights_wire_bytes":
            return f"rollout {row['step']:3d}: {row['value'] / 1e6:.2f} MB were written"
        return super().describe(row)


EXAMPLE = DeltaExample(
    package="examples.delta_weight_sync",
    what="The quickstart's sums, with attention alone trained, and engines that get what changed.",
    data_sets=("held_out",),
    flags=(
        "--prompt-data={data}/train.jsonl",
        "--label-key=label",
        "--apply-chat-template",
        "--custom-rm-path=examples.quickstart.reward.exact_answer",
        # On CPU weights are fp32 and every trained one changes in every step. Above 30 % all would be written.
        "--only-train-params-name-list=self_attention",
        "--update-weight-transport=disk",
        "--update-weight-disk-dir={data}/../shared_weights",
        "--update-weight-mode=delta",
        "--update-weight-local-checkpoint-dir={data}/../local_weights",
        "--update-weight-delta-full-interval=20",
        "--check-weight-update-equal",
    ),
    generate="",
    replaced={"--rollout-batch-size": "64", "--lr": "6e-4", "--kl-loss-coef": "0.05"},
    rollouts=60,
)

if __name__ == "__main__":
    sys.exit(EXAMPLE.main())
