#!/usr/bin/env bash
# Geometry3K: Qwen3.5-35B-A3B learns to solve problems with drawings, on one node of 8 GPUs.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen3.5-35B-A3B-vl.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3.5-35B-A3B"
    --load "$BASE_DIR/Qwen3.5-35B-A3B_geo3k" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen3.5-35B-A3B_geo3k"
    --save-interval 20
)

# prepare.py writes the data. A reward of 1 for the right answer in the last box, else 0.
ROLLOUT_ARGS=(
    --prompt-data "$BASE_DIR/geo3k/train.parquet"
    --input-key problem --label-key answer --multimodal-keys '{"image": "images"}'
    --apply-chat-template --rollout-shuffle
    --rm-type math
    --num-rollout 300
    --rollout-batch-size 64 --n-samples-per-prompt 8 --global-batch-size 512
    --rollout-max-response-len 4096
    --rollout-temperature 0.8
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data geo3k "$BASE_DIR/geo3k/test.parquet"
    --n-samples-per-eval-prompt 1
    --eval-max-response-len 4096
)

PERF_ARGS+=(
    --max-tokens-per-gpu 9216
    --tensor-model-parallel-size 2 --sequence-parallel
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.6
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
