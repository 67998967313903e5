#!/usr/bin/env bash
# Qwen3-4B on two nodes of 8 GPUs: one trains; of the other, four GPUs generate and four judge with Qwen3-32B.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-4B.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --rollout-num-gpus 8
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-4B"
    --load "$BASE_DIR/Qwen3-4B_tournament" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen3-4B_tournament"
    --save-interval 20
)

# Prompts without answers will do: the judge compares what the policy says.
ROLLOUT_ARGS=(
    --group-rm --custom-rm-path examples.tournament.reward.tournament
    --custom-config-path "$SCRIPTS/../examples/tournament/tournament.yaml"
    --prompt-data "$BASE_DIR/prompts.jsonl"
    --input-key prompt --rollout-shuffle --apply-chat-template
    --num-rollout 1000
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --rollout-max-response-len 8192
    --rollout-temperature 1
)

PERF_ARGS+=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --max-tokens-per-gpu 9216
)

SGLANG_ARGS=(
    --sglang-config "$SCRIPTS/../examples/tournament/judge.yaml"
    --sglang-mem-fraction-static 0.8
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${PERF_ARGS[@]}" \
    "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
