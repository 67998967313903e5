#!/usr/bin/env bash
# ReTool: Qwen3-4B learns to solve problems of mathematics with a Python interpreter, on one node of 8 GPUs.
# The model is one that was taught the format by run-sft.sh.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-4B.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

CKPT_ARGS=(
    --hf-checkpoint "${SFT_MODEL:-$BASE_DIR/Qwen3-4B_retool_sft}"
    --load "$BASE_DIR/Qwen3-4B_retool" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen3-4B_retool"
    --save-interval 20
)

# Turns end where a call ends. The reward comes from the environment.
ROLLOUT_ARGS=(
    --custom-generate-function-path slime.rollout.environments.generate
    --environment-config "$SCRIPTS/../examples/retool/retool.yaml"
    --rollout-stop "</code>" "</tool_call>"
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
