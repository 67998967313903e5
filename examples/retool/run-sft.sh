#!/usr/bin/env bash
# The warm-up of ReTool: Qwen3-4B learns the format from demonstrations, on one node of 8 GPUs.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-4B.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-4B"
    --load "$BASE_DIR/Qwen3-4B_retool_sft_checkpoints" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen3-4B_retool_sft_checkpoints"
    --save-interval 1000
    --save-hf "$BASE_DIR/Qwen3-4B_retool_sft/{rollout_id}" # what run.sh starts from
)

ROLLOUT_ARGS=(
    --prompt-data "$BASE_DIR/retool-sft/retool-sft.parquet"
    --input-key messages --rollout-shuffle
    --loss-mask-type qwen3
    --num-epoch 3
    --rollout-batch-size 128 --global-batch-size 128
)

PERF_ARGS+=(
    --max-tokens-per-gpu 9216
)

launch train_async.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${SFT_ARGS[@]}" "${SFT_OPTIMIZER_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
