#!/usr/bin/env bash
# MiniMax-M2 (229B, 10B active), GRPO on 16 nodes x 8 GPUs that training and generation share.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/minimax-m2.sh"

: "${NODES:=16}" "${TP:=2}" "${PP:=2}" "${CP:=1}" "${EP:=32}" "${ENGINE_GPUS:=16}" "${MAX_TOKENS:=20480}"

CLUSTER_ARGS=(
    --actor-num-nodes "$NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

# Engines serve the FP8 checkpoint and get FP8 weights at every sync; the trainer starts from its bf16 version.
CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/MiniMax-M2"
    --ref-load "$BASE_DIR/MiniMax-M2-bf16"
    --load "$BASE_DIR/MiniMax-M2_slime"
    --save "$BASE_DIR/MiniMax-M2_slime"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "$BASE_DIR/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 3000
    --rollout-batch-size 64 --n-samples-per-prompt 8 --global-batch-size 512
    --rollout-max-response-len 16384
    --rollout-temperature 1
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data aime "$BASE_DIR/aime-2024/aime-2024.jsonl"
    --n-samples-per-eval-prompt 8
    --eval-max-response-len 16384
)

# With EP=4 weights and gradients alone would take 160 GB of every GPU.
PERF_ARGS+=(
    --tensor-model-parallel-size "$TP" --sequence-parallel
    --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    --max-tokens-per-gpu "$MAX_TOKENS"
)

OPTIMIZER_ARGS+=("${CPU_ADAM_ARGS[@]}")

# FP8 experts (width 1536, blocks of 128) cannot be cut into 16 slices: every GPU has 16 whole ones.
SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    --sglang-ep-size "$ENGINE_GPUS"
    --sglang-mem-fraction-static 0.7
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
