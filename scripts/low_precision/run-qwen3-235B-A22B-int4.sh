#!/usr/bin/env bash
# run-qwen3-235B-A22B.sh with INT4 experts in the engines, and training that knows of the rounding. Training and
# generation share 8 nodes x 8 GPUs.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/recipe.sh"

# In INT4 the model takes 120 GB: one node is enough for an engine. DeepEP has no kernels for INT4 experts.
export ENGINE_GPUS=${ENGINE_GPUS:-8} ENGINE_DP=${ENGINE_DP:-2}
ENGINE_ARGS=(
    --colocate --sglang-mem-fraction-static 0.7
    --sglang-moe-a2a-backend none --sglang-ep-size "$ENGINE_GPUS"
)

# Engines serve the INT4 checkpoint and get INT4 weights at every sync; the trainer starts from the bf16 one.
CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-235B-A22B-INT4"
    --ref-load "$BASE_DIR/Qwen3-235B-A22B"
    --load "$BASE_DIR/Qwen3-235B-A22B-INT4_slime"
    --save "$BASE_DIR/Qwen3-235B-A22B-INT4_slime"
)

exec "$SCRIPTS/run-qwen3-235B-A22B.sh" "${ENGINE_ARGS[@]}" "${CKPT_ARGS[@]}" "${INT4_QAT_ARGS[@]}" "$@"
