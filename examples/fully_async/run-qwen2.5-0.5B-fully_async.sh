#!/usr/bin/env bash
# Qwen2.5-0.5B-Instruct on GSM8K, fully asynchronous GRPO on two GPUs: one trains while the other generates.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen2.5-0.5B.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node 1 --num-gpus-per-node 2
    --rollout-num-gpus 1 --rollout-num-gpus-per-engine 1
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen2.5-0.5B-Instruct"
    --load "$BASE_DIR/Qwen2.5-0.5B_slime_async" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen2.5-0.5B_slime_async"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async
    --max-staleness 2
    --prompt-data "$BASE_DIR/gsm8k/train.parquet"
    --input-key messages --label-key label --apply-chat-template --rollout-shuffle
    --rm-type math
    --num-rollout 300
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --rollout-max-response-len 1024
    --rollout-temperature 1
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data gsm8k "$BASE_DIR/gsm8k/test.parquet"
    --n-samples-per-eval-prompt 1
    --eval-max-response-len 1024
)

PERF_ARGS+=(
    --max-tokens-per-gpu 9216
)

SGLANG_ARGS=(
    --sglang-mem-fraction-static 0.8
    --sglang-server-concurrency 64
)

launch train_async.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${EVAL_ARGS[@]}" "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" --use-tis "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" "$@"
