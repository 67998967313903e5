#!/usr/bin/env bash
# Qwen3-4B learns mathematics on one node of 8 GPUs and is evaluated on AIME, GPQA and IFBench.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-4B.sh"
export BASE_DIR # multi_task.yaml reads it

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-4B"
    --load "$BASE_DIR/Qwen3-4B_eval_multi_task" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen3-4B_eval_multi_task"
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
    --eval-interval 5
    --eval-config "$SCRIPTS/../examples/eval_multi_task/multi_task.yaml"
    --custom-eval-rollout-log-function-path examples.eval_multi_task.rewards.log_best_of_n
)

PERF_ARGS+=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --max-tokens-per-gpu 9216
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
