#!/usr/bin/env bash
# Kimi-K2-Instruct (1T, 32B active), GRPO on 32 nodes x 8 GPUs that training and generation share.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/kimi-k2.sh"

# 61 layers: seven stages of 8 and a last one of 5, which has the output layer (163840 tokens) besides.
: "${NODES:=32}" "${TP:=8}" "${PP:=8}" "${LAST_STAGE:=5}" "${CP:=4}" "${EP:=32}"
: "${ENGINE_GPUS:=16}" "${ENGINE_DP:=8}" "${MAX_TOKENS:=16384}"
RM_TYPE=math ROLLOUT_BATCH_SIZE=128 MAX_RESPONSE_LEN=8192 EVAL_MAX_RESPONSE_LEN=16384
source "$SCRIPTS/lib/large_moe.sh"

CLUSTER_ARGS+=(--colocate)
PERF_ARGS+=(--moe-enable-deepep --moe-token-dispatcher-type flex --max-tokens-per-gpu "$MAX_TOKENS")

# Engines serve the FP8 checkpoint and get FP8 weights at every sync; the trainer starts from its bf16 version.
CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Kimi-K2-Instruct" --trust-remote-code # its tokenizer is code of its own
    --ref-load "$BASE_DIR/Kimi-K2-Instruct-bf16"
    --load "$BASE_DIR/Kimi-K2-Instruct_slime"
    --save "$BASE_DIR/Kimi-K2-Instruct_slime"
    --save-interval 20
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    --sglang-mem-fraction-static 0.7
    "${DP_ATTENTION_ARGS[@]}" --sglang-dp-size "$ENGINE_DP"
    "${DEEPEP_ARGS[@]}"
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
