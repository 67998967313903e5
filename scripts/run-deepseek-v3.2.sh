#!/usr/bin/env bash
# DeepSeek-V3.2 (671B, 37B active, sparse attention), GRPO on 16 nodes x 8 GPUs that training and generation share.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/deepseek-v3.2.sh"

# 61 layers: 16 + 16 + 16 + 13, the last stage having the output layer besides.
: "${NODES:=16}" "${TP:=8}" "${PP:=4}" "${LAST_STAGE:=13}" "${CP:=4}" "${EP:=32}"
: "${ENGINE_GPUS:=64}" "${ENGINE_DP:=8}" "${MAX_TOKENS:=16384}"
RM_TYPE=deepscaler ROLLOUT_BATCH_SIZE=128 MAX_RESPONSE_LEN=32768 EVAL_MAX_RESPONSE_LEN=32768
source "$SCRIPTS/lib/large_moe.sh"

CLUSTER_ARGS+=(--colocate)
PERF_ARGS+=(--moe-enable-deepep --moe-token-dispatcher-type flex --max-tokens-per-gpu "$MAX_TOKENS")

# Engines serve the FP8 checkpoint and get FP8 weights at every sync; the trainer starts from its bf16 version.
CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/DeepSeek-V3.2"
    --ref-load "$BASE_DIR/DeepSeek-V3.2-bf16"
    --load "$BASE_DIR/DeepSeek-V3.2_slime"
    --save "$BASE_DIR/DeepSeek-V3.2_slime"
    --save-interval 20
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    --sglang-mem-fraction-static 0.7
    "${DP_ATTENTION_ARGS[@]}" --sglang-dp-size "$ENGINE_DP"
    "${DEEPEP_ARGS[@]}"
    "${EAGLE_ARGS[@]}"
    --sglang-server-concurrency 1024 # 128 requests for each data-parallel group of an engine
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
