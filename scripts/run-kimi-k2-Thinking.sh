#!/usr/bin/env bash
# Kimi-K2-Thinking (1T, 32B active), GRPO on 32 nodes x 8 GPUs that training and generation share.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/kimi-k2-thinking.sh"

# 61 layers: seven stages of 8 and a last one of 5, which has the output layer (163840 tokens) besides.
: "${NODES:=32}" "${TP:=8}" "${PP:=8}" "${LAST_STAGE:=5}" "${CP:=4}" "${EP:=32}"
: "${ENGINE_GPUS:=16}" "${ENGINE_DP:=8}" "${MAX_TOKENS:=16384}"
RM_TYPE=deepscaler ROLLOUT_BATCH_SIZE=128 MAX_RESPONSE_LEN=32768 EVAL_MAX_RESPONSE_LEN=32768
source "$SCRIPTS/lib/large_moe.sh"

CLUSTER_ARGS+=(--colocate)
PERF_ARGS+=(--moe-enable-deepep --moe-token-dispatcher-type flex --max-tokens-per-gpu "$MAX_TOKENS")

# Engines serve the INT4 checkpoint and get INT4 weights at every sync; the trainer starts from its bf16 version.
CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Kimi-K2-Thinking" --trust-remote-code # its tokenizer is code of its own
    --ref-load "$BASE_DIR/Kimi-K2-Thinking-bf16"
    --load "$BASE_DIR/Kimi-K2-Thinking_slime"
    --save "$BASE_DIR/Kimi-K2-Thinking_slime"
    --save-interval 20
)

# DeepEP has no kernels for INT4 experts.
SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    --sglang-mem-fraction-static 0.7
    "${DP_ATTENTION_ARGS[@]}" --sglang-dp-size "$ENGINE_DP"
    --sglang-ep-size "$ENGINE_GPUS"
)

# The engine's weights are rounded to INT4 and the trainer's are not: importance weights, at most 2, correct for the
# difference. low_precision/run-kimi-k2-Thinking-int4.sh makes it smaller by training with rounded weights.
launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${TIS_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" "$@"
