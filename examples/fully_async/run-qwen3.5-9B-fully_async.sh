#!/usr/bin/env bash
# Qwen3.5-9B, fully asynchronous GRPO on one node of 8 GPUs: 4 train while 4 generate.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen3.5-9B.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node 4 --num-gpus-per-node "$GPUS_PER_NODE"
    --rollout-num-gpus 4 --rollout-num-gpus-per-engine 1
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3.5-9B"
    --load "$BASE_DIR/Qwen3.5-9B_slime_async" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen3.5-9B_slime_async"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async
    --max-staleness 2
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

PERF_ARGS+=(
    --tensor-model-parallel-size 4 --sequence-parallel
    --max-tokens-per-gpu 9216
)

OPTIMIZER_ARGS+=("${CPU_ADAM_ARGS[@]}") # one data-parallel rank: the states cannot be divided

SGLANG_ARGS=(
    --sglang-mem-fraction-static 0.8
    --sglang-server-concurrency 64
)

launch train_async.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${EVAL_ARGS[@]}" "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" --use-tis "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" "$@"
