#!/usr/bin/env bash
# tau2-bench: Qwen3-4B learns to serve the customers of its retail domain, on one node of 8 GPUs. The customers are
# played by the language model that retail.yaml names.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-4B-Instruct-2507.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-4B-Instruct-2507"
    --load "$BASE_DIR/Qwen3-4B_tau_bench" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen3-4B_tau_bench"
    --save-interval 20
)

# The reward comes from the environment. Groups whose rewards are all equal teach nothing, and are drawn again.
ROLLOUT_ARGS=(
    --custom-generate-function-path slime.rollout.environments.generate
    --environment-config "$SCRIPTS/../examples/tau_bench/retail.yaml"
    --prompt-data "$BASE_DIR/tau2/retail_train.jsonl"
    --input-key prompt --rollout-shuffle
    --num-rollout 500
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --over-sampling-batch-size 64
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --rollout-max-response-len 16384 # of the whole conversation
    --rollout-temperature 1
)

EVAL_ARGS=(
    --eval-interval 10
    --eval-prompt-data retail "$BASE_DIR/tau2/retail_test.jsonl"
    --n-samples-per-eval-prompt 1
    --eval-max-response-len 16384
    --eval-top-k 1
)

PERF_ARGS+=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --context-parallel-size 2
    --max-tokens-per-gpu 16384
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
