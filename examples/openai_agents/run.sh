#!/usr/bin/env bash
# Qwen2.5-3B learns to search as an agent of the OpenAI Agents SDK, with the settings of Search-R1, on one node of 8
# GPUs: four train, four generate. Start it with the services of services.yaml.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen2.5-3B.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node 4 --num-gpus-per-node "$GPUS_PER_NODE"
    --rollout-num-gpus 4
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen2.5-3B-Instruct"
    --load "$BASE_DIR/Qwen2.5-3B_openai_agents" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen2.5-3B_openai_agents"
    --save-interval 20
)

# The agent's questions are the rows of the data; its sessions come from the buffer, made by slightly older weights.
ROLLOUT_ARGS=(
    --rollout-function-path slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout
    --rollout-buffer-url http://127.0.0.1:8889 --rollout-task-type openai_agents
    --prompt-data "$BASE_DIR/nq_hotpotqa_train/train.parquet"
    --input-key prompt --label-key reward_model
    --num-rollout 3000
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --rollout-max-response-len 512 # of one turn
    --rollout-temperature 1
    --use-tis
)

PERF_ARGS+=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --max-tokens-per-gpu 9216
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.8
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${PERF_ARGS[@]}" \
    "${GRPO_ARGS[@]}" --kl-loss-coef 0.001 "${OPTIMIZER_ARGS[@]}" --weight-decay 0.01 "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" "$@"
