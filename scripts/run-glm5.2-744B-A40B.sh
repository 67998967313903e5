#!/usr/bin/env bash
# GLM-5.2 (744B, 40B active, sparse attention), GRPO with long responses on 32 nodes x 8 GPUs that training and
# generation share. Which engines read prompts and which generate is in configs/glm5.2-744B-A40B-sglang.yaml.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/glm5.2-744B-A40B.sh"

# 78 layers: 14, six stages of 8, and 16. Layers 0, 1, 2, 6, 10, ... select keys, the others use their selections, and
# every stage must begin with one that selects. Eight context-parallel ranks hold sequences of 8 x MAX_TOKENS.
: "${NODES:=32}" "${TP:=4}" "${PP:=8}" "${FIRST_STAGE:=14}" "${LAST_STAGE:=16}" "${CP:=8}" "${EP:=32}"
: "${ENGINE_GPUS:=64}" "${ENGINE_DP:=8}" "${MAX_TOKENS:=16384}"
: "${SGLANG_CONFIG:=$SCRIPTS/configs/glm5.2-744B-A40B-sglang.yaml}"
RM_TYPE=deepscaler ROLLOUT_BATCH_SIZE=64 MAX_RESPONSE_LEN=65536 EVAL_MAX_RESPONSE_LEN=65536
source "$SCRIPTS/lib/large_moe.sh"

CLUSTER_ARGS+=(--colocate)
PERF_ARGS+=(--moe-enable-deepep --moe-token-dispatcher-type flex --max-tokens-per-gpu "$MAX_TOKENS")

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/GLM-5.2"
    --load "$BASE_DIR/GLM-5.2_slime"
    --save "$BASE_DIR/GLM-5.2_slime"
    --save-interval 20
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    --sglang-config "$SGLANG_CONFIG"
    --sglang-mem-fraction-static 0.7
    "${DP_ATTENTION_ARGS[@]}" --sglang-dp-size "$ENGINE_DP"
    "${DEEPEP_ARGS[@]}"
    "${EAGLE_ARGS[@]}"
    --sglang-server-concurrency 1024
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${TIS_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" "$@"
