#!/usr/bin/env bash
# Search-R1: Qwen2.5-3B learns to search before it answers, on one node of 8 GPUs. A retrieval server listens on port 8000.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen2.5-3B.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen2.5-3B"
    --load "$BASE_DIR/Qwen2.5-3B_search_r1" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen2.5-3B_search_r1"
    --save-interval 20
)

# Turns end where a search or an answer ends. The reward comes from the environment.
ROLLOUT_ARGS=(
    --custom-generate-function-path slime.rollout.environments.generate
    --environment-config "$SCRIPTS/../examples/search_r1/search.yaml"
    --rollout-stop "</search>" "</answer>"
    --prompt-data "$BASE_DIR/nq_hotpotqa_train/train.parquet"
    --input-key prompt --label-key reward_model --rollout-shuffle
    --num-rollout 3000
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --rollout-max-response-len 512 # of the whole response, documents included
    --rollout-temperature 1
)

PERF_ARGS+=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --max-tokens-per-gpu 9216
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${PERF_ARGS[@]}" \
    "${GRPO_ARGS[@]}" --kl-loss-coef 0.001 "${OPTIMIZER_ARGS[@]}" --weight-decay 0.01 "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" "$@"
