#!/usr/bin/env bash
# GLM-4.7 (355B, 32B active; the architecture of GLM-4.5), GSPO on 8 nodes x 8 GPUs that training and generation share.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/glm4.5-355B-A32B.sh"

: "${NODES:=8}" "${TP:=8}" "${PP:=4}" "${CP:=2}" "${EP:=16}"
: "${ENGINE_GPUS:=32}" "${ENGINE_DP:=4}" "${MAX_TOKENS:=16384}"
LAST_STAGE= # 92 layers: 23 on each stage
RM_TYPE=deepscaler ROLLOUT_BATCH_SIZE=64 MAX_RESPONSE_LEN=8192 EVAL_MAX_RESPONSE_LEN=16384
source "$SCRIPTS/lib/large_moe.sh"

CLUSTER_ARGS+=(--colocate)
PERF_ARGS+=(--moe-enable-deepep --moe-token-dispatcher-type flex --max-tokens-per-gpu "$MAX_TOKENS")

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/GLM-4.7"
    --load "$BASE_DIR/GLM-4.7_slime"
    --save "$BASE_DIR/GLM-4.7_slime"
    --save-interval 20
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    --sglang-mem-fraction-static 0.7
    "${DP_ATTENTION_ARGS[@]}" --sglang-dp-size "$ENGINE_DP"
    "${DEEPEP_ARGS[@]}"
    "${EAGLE_ARGS[@]}"
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GSPO_ARGS[@]}" "${TIS_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" "$@"
