#!/usr/bin/env bash
# AgentFlow: Qwen2.5-7B-Instruct learns to plan, on two nodes of 8 GPUs: one trains; of the other, four GPUs are the
# planner's and four those of the models that are not trained.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen2.5-7B.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --rollout-num-gpus 8
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen2.5-7B-Instruct"
    --load "$BASE_DIR/Qwen2.5-7B-Instruct_agentflow" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen2.5-7B-Instruct_agentflow"
    --save-interval 20
)

# 32 queries with 8 executions each, of up to three turns of the planner; steps of 8 queries.
ROLLOUT_ARGS=(
    --custom-generate-function-path examples.agentflow.rollout.generate
    --custom-rm-path examples.agentflow.rollout.reward_func
    --custom-rollout-log-function-path examples.agentflow.rollout.rollout_log
    --custom-config-path "$SCRIPTS/../examples/agentflow/agentflow.yaml"
    --prompt-data "$BASE_DIR/agentflow/combined_train.parquet"
    --input-key question --label-key result --rollout-shuffle
    --num-epoch 5
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 64
    --rollout-max-context-len 20480 --rollout-max-response-len 2048 # of a turn
    --rollout-temperature 0.7
)

EVAL_ARGS=(
    --custom-eval-rollout-log-function-path examples.agentflow.rollout.eval_log
    --eval-interval 20
    --eval-prompt-data aime24 "$BASE_DIR/agentflow/aime24.parquet"
    --n-samples-per-eval-prompt 1
    --eval-temperature 0
)

PERF_ARGS+=(
    --tensor-model-parallel-size 4 --sequence-parallel
    --max-tokens-per-gpu 20480
)

# Flow-GRPO: the turns of an execution weigh alike, whatever their lengths.
FLOW_GRPO_ARGS=(
    --pg-loss-reducer turn_mean
    --kl-loss-coef 0.001 --eps-clip-high 0.3
)

SGLANG_ARGS=(
    --sglang-config "$SCRIPTS/../examples/agentflow/engines.yaml"
    --sglang-mem-fraction-static 0.8
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${FLOW_GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" "$@"
