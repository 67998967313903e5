#!/usr/bin/env bash
# Qwen3-4B learns mathematics with an interpreter as an agent of Strands Agents, on one node of 8 GPUs. The model is one
# that was taught the format by ../retool/run-sft.sh, or any other that calls tools.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-4B.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

CKPT_ARGS=(
    --hf-checkpoint "${SFT_MODEL:-$BASE_DIR/Qwen3-4B}"
    --load "$BASE_DIR/Qwen3-4B_strands" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen3-4B_strands"
    --save-interval 20
)

# The agent renders its prompts: no --apply-chat-template.
ROLLOUT_ARGS=(
    --custom-generate-function-path examples.strands_sglang.generate.generate
    --custom-rm-path examples.strands_sglang.generate.reward_func
    --custom-config-path "$SCRIPTS/../examples/strands_sglang/strands.yaml"
    --prompt-data "$BASE_DIR/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt --label-key label --rollout-shuffle
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
    --tensor-model-parallel-size 2 --sequence-parallel
    --max-tokens-per-gpu 9216
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
