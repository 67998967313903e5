#!/usr/bin/env bash
# Qwen3-Coder-30B-A3B learns to fix repositories with a coding agent in E2B sandboxes, on 8 nodes of 8 GPUs.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-30B-A3B.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 4 --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --rollout-num-gpus 32
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-Coder-30B-A3B-Instruct"
    --load "$BASE_DIR/Qwen3-Coder-30B-A3B_coding_agent" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen3-Coder-30B-A3B_coding_agent"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --custom-generate-function-path examples.coding_agent_rl.generate.generate
    --prompt-data "$BASE_DIR/swe_tasks/train.jsonl"
    --input-key prompt --rollout-shuffle
    --num-rollout 1000
    --rollout-batch-size 8 --n-samples-per-prompt 8 --global-batch-size 64
    --rollout-max-context-len 96000 --rollout-max-response-len 32768
    --rollout-temperature 1
)

PERF_ARGS+=(
    --tensor-model-parallel-size 4 --sequence-parallel
    --context-parallel-size 4
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --max-tokens-per-gpu 24576
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.8
    --sglang-tool-call-parser qwen3_coder --sglang-reasoning-parser qwen3
)

launch train_async.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" --rotary-base 10000000 "${CKPT_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" "$@"
