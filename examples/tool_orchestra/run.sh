#!/usr/bin/env bash
# ToolOrchestra: Qwen3-8B calls tools and larger models, on five nodes of 8 GPUs: one trains, one generates, and the
# experts have 24 GPUs. The retrieval server is one of services.yaml.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-8B.sh"
EXAMPLE=$SCRIPTS/../examples/tool_orchestra

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --rollout-num-gpus 32
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-8B"
    --load "$BASE_DIR/Qwen3-8B_tool_orchestra" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen3-8B_tool_orchestra"
    --save-interval 20
)

# An execution is a sample for every turn; executions without an answer and turns without a call are out of the loss.
ROLLOUT_ARGS=(
    --custom-generate-function-path examples.tool_orchestra.rollout.generate
    --custom-rollout-log-function-path examples.tool_orchestra.rollout.log_executions
    --custom-config-path "$EXAMPLE/orchestra.yaml"
    --group-rm --custom-rm-path examples.tool_orchestra.reward.preference_reward
    --custom-reward-post-process-path examples.tool_orchestra.reward.clipped_advantages
    --dynamic-sampling-filter-path examples.tool_orchestra.reward.is_varied
    --prompt-data "$BASE_DIR/tool_orchestra/qa.jsonl"
    --input-key prompt --label-key label --metadata-key metadata --rollout-shuffle
    --num-rollout 1000
    --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 128
    --rollout-max-context-len 32768 --rollout-max-response-len 8768
    --rollout-temperature 1
)

PERF_ARGS+=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --context-parallel-size 2
    --max-tokens-per-gpu 16384
)

SGLANG_ARGS=(
    --sglang-config "$EXAMPLE/experts.yaml"
    --sglang-mem-fraction-static 0.8
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${PERF_ARGS[@]}" \
    "${GRPO_ARGS[@]}" --kl-loss-coef 0.0001 --kl-loss-type k2 "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" "$@"
