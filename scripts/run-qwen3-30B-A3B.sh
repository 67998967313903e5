#!/usr/bin/env bash
# Qwen3-30B-A3B (128 experts), GRPO on one node of 8 GPUs that training and generation share.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-30B-A3B.sh"

: "${NODES:=1}" "${TP:=4}" "${CP:=1}" "${EP:=8}" "${ENGINE_GPUS:=8}" "${MAX_TOKENS:=20480}"

CLUSTER_ARGS=(
    --actor-num-nodes "$NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-30B-A3B"
    --load "$BASE_DIR/Qwen3-30B-A3B_slime"
    --save "$BASE_DIR/Qwen3-30B-A3B_slime"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "$BASE_DIR/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type deepscaler
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

# Experts are divided by whole experts only: cutting their narrow matrices (768) too would starve the GPUs.
PERF_ARGS+=(
    --tensor-model-parallel-size "$TP" --sequence-parallel
    --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    --max-tokens-per-gpu "$MAX_TOKENS"
)

OPTIMIZER_ARGS+=("${CPU_ADAM_ARGS[@]}") # with EP 8 every expert is on one GPU of the node, with all its states

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    --sglang-ep-size "$ENGINE_GPUS"
    --sglang-mem-fraction-static 0.7
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
