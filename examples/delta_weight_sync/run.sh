#!/usr/bin/env bash
# Qwen3-30B-A3B on two nodes of 8 GPUs: one trains, the other generates and gets what changed over a shared file system.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-30B-A3B.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --rollout-num-gpus "$GPUS_PER_NODE" --rollout-num-gpus-per-engine 4
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-30B-A3B"
    --load "$BASE_DIR/Qwen3-30B-A3B_delta" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen3-30B-A3B_delta"
    --save-interval 20
)

# All nodes see the first directory. The second is on a disk of each node: its engines load from there.
WEIGHT_ARGS=(
    --update-weight-transport disk
    --update-weight-disk-dir "$BASE_DIR/Qwen3-30B-A3B_delta_weights"
    --update-weight-mode delta
    --update-weight-local-checkpoint-dir "${LOCAL_DIR:-/tmp}/Qwen3-30B-A3B_weights"
    --update-weight-delta-encoding xor
    --update-weight-delta-full-interval 50
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

PERF_ARGS+=(
    --tensor-model-parallel-size 4 --sequence-parallel
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --max-tokens-per-gpu 20480
)

SGLANG_ARGS=(
    --sglang-mem-fraction-static 0.8
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${WEIGHT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${CPU_ADAM_ARGS[@]}" "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" "$@"
