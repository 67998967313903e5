#!/usr/bin/env bash
# GLM-5 (744B, 40B active, sparse attention), GRPO on 32 nodes x 8 GPUs that training and generation share. One engine
# of 64 GPUs reads prompts, three generate.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/glm5-744B-A40B.sh"

# 78 layers: 20 + 20 + 20 + 18, the last stage having the output layer besides.
: "${NODES:=32}" "${TP:=4}" "${PP:=4}" "${LAST_STAGE:=18}" "${CP:=2}" "${EP:=32}"
: "${ENGINE_GPUS:=64}" "${ENGINE_DP:=8}" "${PREFILL_ENGINES:=1}" "${MAX_TOKENS:=20480}"
RM_TYPE=deepscaler ROLLOUT_BATCH_SIZE=128 MAX_RESPONSE_LEN=32768 EVAL_MAX_RESPONSE_LEN=32768
source "$SCRIPTS/lib/large_moe.sh"

CLUSTER_ARGS+=(--colocate)
PERF_ARGS+=(--moe-enable-deepep --moe-token-dispatcher-type flex --max-tokens-per-gpu "$MAX_TOKENS")

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/GLM-5"
    --load "$BASE_DIR/GLM-5_slime"
    --save "$BASE_DIR/GLM-5_slime"
    --save-interval 20
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    --prefill-num-servers "$PREFILL_ENGINES"
    --sglang-mem-fraction-static 0.7
    "${DP_ATTENTION_ARGS[@]}" --sglang-dp-size "$ENGINE_DP"
    "${DEEPEP_ARGS[@]}"
    "${EAGLE_ARGS[@]}"
    --sglang-server-concurrency 1024
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
