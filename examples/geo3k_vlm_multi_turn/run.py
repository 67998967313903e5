"""The small version: ``python -m examples.geo3k_vlm_multi_turn.run``."""

from __future__ import annotations

import sys
from dataclasses import replace

from examples.geo3k_vlm.run import EXAMPLE as ONE_TURN

EXAMPLE = replace(
    ONE_TURN,
    package="examples.geo3k_vlm_multi_turn",
    what="Two drawings in one picture: the model learns to look at the one it is asked about, and to read it.",
    data_sets=("pairs",),
    flags=(*ONE_TURN.flags, "--custom-config-path=examples/geo3k_vlm_multi_turn/pairs.yaml"),
    generate="examples.geo3k_vlm_multi_turn.rollout.generate",
    replaced={**ONE_TURN.replaced, "--rollout-max-response-len": "40"},
    sft_rollouts=15,
)

if __name__ == "__main__":
    sys.exit(EXAMPLE.main())
