"""The small version: ``python -m examples.tournament.run``."""

from __future__ import annotations

import sys

from examples.small_run import SmallExample

EXAMPLE = SmallExample(
    package="examples.tournament",
    what="Sums, learned from which of two answers is nearer: no answer is ever called right.",
    data_sets=("held_out",),
    flags=(
        "--prompt-data={data}/train.jsonl",
        "--label-key=label",
        "--apply-chat-template",
        "--group-rm",
        "--custom-rm-path=examples.tournament.reward.tournament",
        "--custom-config-path=examples/tournament/small.yaml",
        "--eval-function-path=examples.tournament.reward.evaluate",
    ),
    generate="",
    replaced={"--rollout-batch-size": "48"},
    rollouts=60,
)

if __name__ == "__main__":
    sys.exit(EXAMPLE.main())
