#!/usr/bin/env bash
# Qwen3.5-27B (three of four layers with linear attention), GRPO on one node of 8 GPUs that training and generation
# share. Engines draft with the model's multi-token-prediction layer.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/qwen3.5-27B.sh"

: "${NODES:=1}" "${TP:=4}" "${PP:=2}" "${CP:=1}" "${ENGINE_GPUS:=4}" "${MAX_TOKENS:=16384}"

CLUSTER_ARGS=(
    --actor-num-nodes "$NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3.5-27B"
    --load "$BASE_DIR/Qwen3.5-27B_slime"
    --save "$BASE_DIR/Qwen3.5-27B_slime"
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

# Four groups of keys and values: tensor parallelism ends at 4, two pipeline stages share the rest.
PERF_ARGS+=(
    --tensor-model-parallel-size "$TP" --sequence-parallel
    --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP"
    --max-tokens-per-gpu "$MAX_TOKENS"
)

OPTIMIZER_ARGS+=("${CPU_ADAM_ARGS[@]}") # one data-parallel rank: the states cannot be divided

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    --sglang-mem-fraction-static 0.7
    "${EAGLE_ARGS[@]}"
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
