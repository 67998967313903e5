#!/usr/bin/env bash
# Qwen3-235B-A22B, GSPO on 16 nodes x 8 GPUs: 8 nodes train, the engines have 8 nodes of their own.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-235B-A22B.sh"

# 94 layers: 24 + 24 + 24 + 22, the last stage having the output layer besides.
: "${TRAIN_NODES:=8}" "${ROLLOUT_GPUS:=64}" "${TP:=4}" "${PP:=4}" "${LAST_STAGE:=22}" "${CP:=2}" "${EP:=16}"
: "${ENGINE_GPUS:=32}" "${ENGINE_DP:=4}" "${MAX_TOKENS:=16384}"
NODES=$TRAIN_NODES # those of the trainer; the engines have others
RM_TYPE=deepscaler ROLLOUT_BATCH_SIZE=64 MAX_RESPONSE_LEN=8192 EVAL_MAX_RESPONSE_LEN=16384
source "$SCRIPTS/lib/large_moe.sh"

CLUSTER_ARGS+=(--rollout-num-gpus "$ROLLOUT_GPUS")
PERF_ARGS+=(--max-tokens-per-gpu "$MAX_TOKENS")

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-235B-A22B"
    --load "$BASE_DIR/Qwen3-235B-A22B_slime"
    --save "$BASE_DIR/Qwen3-235B-A22B_slime"
    --save-interval 20
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    "${DP_ATTENTION_ARGS[@]}" --sglang-dp-size "$ENGINE_DP"
    "${DEEPEP_ARGS[@]}"
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GSPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
