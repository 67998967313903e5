#!/usr/bin/env bash
# run-qwen3-30B-A3B.sh with INT4 experts in the engines, and training that knows of the rounding.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/recipe.sh"

# Engines serve the INT4 checkpoint and get INT4 weights at every sync; the trainer starts from the bf16 one.
CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-30B-A3B-INT4"
    --ref-load "$BASE_DIR/Qwen3-30B-A3B"
    --load "$BASE_DIR/Qwen3-30B-A3B-INT4_slime"
    --save "$BASE_DIR/Qwen3-30B-A3B-INT4_slime"
)

exec "$SCRIPTS/run-qwen3-30B-A3B.sh" "${CKPT_ARGS[@]}" "${INT4_QAT_ARGS[@]}" "$@"
