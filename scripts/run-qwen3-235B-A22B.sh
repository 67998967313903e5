#!/usr/bin/env bash
# Qwen3-235B-A22B, GSPO on 16 nodes x 8 GPUs: 8 nodes train, the engines have 8 nodes of their own.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-235B-A22B.sh"

: "${TRAIN_NODES:=8}" "${ROLLOUT_GPUS:=64}" "${TP:=4}" "${PP:=4}" "${LAST_STAGE:=22}" "${CP:=2}" "${EP:=16}"
: "${ENGINE_GPUS:=32}" "${ENGINE_DP:=4}" "${MAX_TOKENS:=16384}"

CLUSTER_ARGS=(
    --actor-num-nodes "$TRAIN_NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --rollout-num-gpus "$ROLLOUT_GPUS"
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-235B-A22B"
    --load "$BASE_DIR/Qwen3-235B-A22B_slime"
    --save "$BASE_DIR/Qwen3-235B-A22B_slime"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "$BASE_DIR/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 3000
    --rollout-batch-size 64 --n-samples-per-prompt 8 --global-batch-size 512
    --over-sampling-batch-size 128
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

# 94 layers: 24 + 24 + 24 + 22, the last stage having the output layer besides.
PERF_ARGS+=(
    --tensor-model-parallel-size "$TP" --sequence-parallel
    --pipeline-model-parallel-size "$PP" --decoder-last-pipeline-num-layers "$LAST_STAGE"
    --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    --max-tokens-per-gpu "$MAX_TOKENS"
)

OPTIMIZER_ARGS+=("${CPU_ADAM_ARGS[@]}")

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    "${DP_ATTENTION_ARGS[@]}" --sglang-dp-size "$ENGINE_DP"
    "${DEEPEP_ARGS[@]}"
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GSPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
