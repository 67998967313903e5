#!/usr/bin/env bash
# Qwen3-4B-Base, supervised fine-tuning on OpenHermes 2.5, one node of 8 GPUs.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-4B.sh"

: "${NODES:=1}" "${CP:=1}" "${MAX_TOKENS:=9216}"

CLUSTER_ARGS=(
    --actor-num-nodes "$NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-4B-Base"
    --load "$BASE_DIR/Qwen3-4B-Base_sft"
    --save "$BASE_DIR/Qwen3-4B-Base_sft"
    --save-interval 1000
    --save-hf "$BASE_DIR/Qwen3-4B-Base_sft/hf-{rollout_id}" # what run-qwen3-4B.sh can start from
)

# A "rollout" is a batch of conversations, and one optimizer step.
ROLLOUT_ARGS=(
    --prompt-data "$BASE_DIR/openhermes2_5/openhermes2_5.parquet"
    --input-key messages --rollout-shuffle
    --loss-mask-type qwen3
    --num-epoch 3
    --rollout-batch-size 128 --global-batch-size 128
)

PERF_ARGS+=(
    --context-parallel-size "$CP"
    --max-tokens-per-gpu "$MAX_TOKENS"
)

launch train_async.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${SFT_ARGS[@]}" "${SFT_OPTIMIZER_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
