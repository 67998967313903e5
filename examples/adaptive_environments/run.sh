#!/usr/bin/env bash
# Qwen3-4B in two environments whose difficulty follows success, on one node of 8 GPUs.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-4B.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-4B"
    --load "$BASE_DIR/Qwen3-4B_adaptive" # an interrupted run resumes from here, its difficulties too
    --save "$BASE_DIR/Qwen3-4B_adaptive"
    --save-interval 20
)

# There is no prompt file: the environments make their tasks up.
ROLLOUT_ARGS=(
    --custom-generate-function-path slime.rollout.environments.generate
    --data-source-path slime.rollout.environments.EnvironmentDataSource
    --environment-config "$SCRIPTS/../examples/adaptive_environments/adaptive.yaml"
    --num-rollout 300
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --rollout-max-response-len 8192
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

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
