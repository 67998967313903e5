#!/usr/bin/env bash
# run-moonlight-16B-A3B.sh with INT4 experts in the engines, and training that knows of the rounding.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/recipe.sh"

# DeepEP has no kernels for INT4 experts.
export ENGINE_GPUS=${ENGINE_GPUS:-8}
ENGINE_ARGS=(--sglang-moe-a2a-backend none --sglang-ep-size "$ENGINE_GPUS")

# Engines serve the INT4 checkpoint and get INT4 weights at every sync; the trainer starts from the bf16 one.
CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Moonlight-16B-A3B-Instruct-INT4"
    --ref-load "$BASE_DIR/Moonlight-16B-A3B-Instruct"
    --load "$BASE_DIR/Moonlight-16B-A3B-Instruct-INT4_slime"
    --save "$BASE_DIR/Moonlight-16B-A3B-Instruct-INT4_slime"
)

exec "$SCRIPTS/run-moonlight-16B-A3B.sh" "${ENGINE_ARGS[@]}" "${CKPT_ARGS[@]}" "${INT4_QAT_ARGS[@]}" "$@"
