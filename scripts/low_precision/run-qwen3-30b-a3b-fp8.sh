#!/usr/bin/env bash
# run-qwen3-30B-A3B.sh in FP8 on both sides, for Hopper GPUs. The trainer repeats the engine's choice of experts.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/recipe.sh"

# Engines serve the FP8 checkpoint and get FP8 weights at every sync; the trainer starts from the bf16 one.
CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-30B-A3B-FP8"
    --ref-load "$BASE_DIR/Qwen3-30B-A3B"
    --load "$BASE_DIR/Qwen3-30B-A3B-FP8_slime"
    --save "$BASE_DIR/Qwen3-30B-A3B-FP8_slime"
)

# Rounding sends tokens to other experts. The engine records where it sent them, and the trainer sends them there too.
REPLAY_ARGS=(--use-rollout-routing-replay)

exec "$SCRIPTS/run-qwen3-30B-A3B.sh" "${CKPT_ARGS[@]}" "${FP8_ARGS[@]}" "${REPLAY_ARGS[@]}" "$@"
