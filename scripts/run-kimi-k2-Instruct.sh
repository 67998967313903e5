#!/usr/bin/env bash
# Kimi-K2-Instruct (1T, 32B active), GRPO on 32 nodes x 8 GPUs that training and generation share.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/kimi-k2.sh"

: "${NODES:=32}" "${TP:=8}" "${PP:=8}" "${LAST_STAGE:=5}" "${CP:=4}" "${EP:=32}"
: "${ENGINE_GPUS:=16}" "${ENGINE_DP:=8}" "${MAX_TOKENS:=16384}"

CLUSTER_ARGS=(
    --actor-num-nodes "$NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

# Engines serve the FP8 checkpoint and get FP8 weights at every sync; the trainer starts from its bf16 version.
CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Kimi-K2-Instruct" --trust-remote-code # its tokenizer is code of its own
    --ref-load "$BASE_DIR/Kimi-K2-Instruct-bf16"
    --load "$BASE_DIR/Kimi-K2-Instruct_slime"
    --save "$BASE_DIR/Kimi-K2-Instruct_slime"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "$BASE_DIR/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type math
    --num-rollout 3000
    --rollout-batch-size 128 --n-samples-per-prompt 8 --global-batch-size 1024
    --over-sampling-batch-size 256
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --rollout-max-response-len 8192
    --rollout-temperature 1
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data aime "$BASE_DIR/aime-2024/aime-2024.jsonl"
    --n-samples-per-eval-prompt 8
    --eval-max-response-len 16384
)

# 61 layers: seven stages of 8 and a last one of 5, which has the output layer (163840 tokens) besides.
PERF_ARGS+=(
    --tensor-model-parallel-size "$TP" --sequence-parallel
    --pipeline-model-parallel-size "$PP" --decoder-last-pipeline-num-layers "$LAST_STAGE"
    --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    --moe-enable-deepep --moe-token-dispatcher-type flex
    --max-tokens-per-gpu "$MAX_TOKENS"
)

OPTIMIZER_ARGS+=("${CPU_ADAM_ARGS[@]}")

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    --sglang-mem-fraction-static 0.7
    "${DP_ATTENTION_ARGS[@]}" --sglang-dp-size "$ENGINE_DP"
    "${DEEPEP_ARGS[@]}"
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
