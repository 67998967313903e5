#!/usr/bin/env bash
# GLM-Z1-9B, GRPO on one node of 8 GPUs: 4 train while 4 others hold the engines, and no memory is moved in between.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/glm4-9B.sh"

: "${TRAIN_GPUS:=4}" "${ROLLOUT_GPUS:=4}" "${TP:=2}" "${CP:=2}" "${ENGINE_GPUS:=2}" "${MAX_TOKENS:=4608}"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "$TRAIN_GPUS" --num-gpus-per-node "$GPUS_PER_NODE"
    --rollout-num-gpus "$ROLLOUT_GPUS"
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/GLM-Z1-9B-0414"
    --load "$BASE_DIR/GLM-Z1-9B-0414_slime"
    --save "$BASE_DIR/GLM-Z1-9B-0414_slime"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "$BASE_DIR/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 3000
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --rollout-max-response-len 8192
    --rollout-temperature 1
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data aime "$BASE_DIR/aime-2024/aime-2024.jsonl"
    --n-samples-per-eval-prompt 16
    --eval-max-response-len 16384
)

# Two groups of keys and values: tensor parallelism ends at 2, context parallelism halves the sequences.
PERF_ARGS+=(
    --tensor-model-parallel-size "$TP" --sequence-parallel
    --context-parallel-size "$CP"
    --max-tokens-per-gpu "$MAX_TOKENS"
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
