#!/usr/bin/env bash
# Qwen3-30B-A3B as five solvers, five rewriters and a selector, on one node of 8 GPUs.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-30B-A3B.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-30B-A3B"
    --load "$BASE_DIR/Qwen3-30B-A3B_multi_agent" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen3-30B-A3B_multi_agent"
    --save-interval 20
)

# An execution makes up to eleven samples, which together weigh as much as one.
ROLLOUT_ARGS=(
    --custom-generate-function-path examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents
    --custom-rollout-log-function-path examples.multi_agent.rollout_with_multi_agents.log_agents
    --custom-config-path "$SCRIPTS/../examples/multi_agent/multi_agent.yaml"
    --rm-type deepscaler
    --prompt-data "$BASE_DIR/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt --label-key label --rollout-shuffle
    --num-rollout 3000
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --rollout-max-context-len 16384 --rollout-max-response-len 8192
    --rollout-temperature 1
    --use-rollout-logprobs
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data aime "$BASE_DIR/aime-2024/aime-2024.jsonl"
    --n-samples-per-eval-prompt 4
    --eval-max-response-len 8192
)

PERF_ARGS+=(
    --tensor-model-parallel-size 4 --sequence-parallel
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --max-tokens-per-gpu 20480
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.7
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${CPU_ADAM_ARGS[@]}" "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" "$@"
