#!/usr/bin/env bash
# run-qwen3-4B.sh in FP8 on both sides, for Hopper GPUs.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/recipe.sh"

# Engines serve the FP8 checkpoint and get FP8 weights at every sync; the trainer starts from the bf16 one.
CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-4B-FP8"
    --ref-load "$BASE_DIR/Qwen3-4B"
    --load "$BASE_DIR/Qwen3-4B-FP8_slime"
    --save "$BASE_DIR/Qwen3-4B-FP8_slime"
)

exec "$SCRIPTS/run-qwen3-4B.sh" "${CKPT_ARGS[@]}" "${FP8_ARGS[@]}" "$@"
