#!/usr/bin/env bash
# Qwen2.5-0.5B-Instruct on GSM8K with one small GPU, e.g. a GB10: a few minutes that show whether an installation works.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/qwen2.5-0.5B.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node 1 --num-gpus-per-node 1
    --colocate
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen2.5-0.5B-Instruct"
)

ROLLOUT_ARGS=(
    --prompt-data "$BASE_DIR/gsm8k/train.parquet"
    --input-key messages --label-key label --apply-chat-template --rollout-shuffle
    --rm-type math
    --num-rollout 3
    --rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 32
    --rollout-max-response-len 512
    --rollout-temperature 1
)

PERF_ARGS+=(
    --max-tokens-per-gpu 4096
)

# GB10 shares its memory with the host: little for the engine. Recording graphs would take longer than three rollouts.
SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.3
    --sglang-disable-cuda-graph
    --sglang-attention-backend triton # also where flash attention 3 has no kernels
)

MISC_ARGS+=(--attention-backend auto)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
