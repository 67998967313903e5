"""The small version: ``python -m examples.geo3k_vlm.run``."""

from __future__ import annotations

import sys

from examples.geo3k_vlm.drawings import MODEL
from examples.small_run import SmallExample

EXAMPLE = SmallExample(
    package="examples.geo3k_vlm",
    what="Sides of rectangles: the model learns to read drawings.",
    data_sets=("drawings",),
    watched=("exchanged",),
    flags=(
        "--prompt-data={data}/train.jsonl",
        "--label-key=label",
        "--rm-type=math",
        "--apply-chat-template",
        '--multimodal-keys={{"image": "images"}}',
        "--train-vision-tower",
        "--eval-config={data}/eval.yaml",
    ),
    generate="",
    replaced={
        "--rollout-max-response-len": "12",
        "--rollout-batch-size": "32",
        "--kl-loss-coef": "0.01",
        "--lr": "4e-4",
        "--n-samples-per-eval-prompt": "2",
    },
    rollouts=20,
    model=MODEL,
    sft_flags=('--multimodal-keys={"image": "images"}', "--train-vision-tower", "--global-batch-size=64"),
    sft_rollouts=20,
)

if __name__ == "__main__":
    sys.exit(EXAMPLE.main())
