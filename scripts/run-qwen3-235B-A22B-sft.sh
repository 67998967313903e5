#!/usr/bin/env bash
# Qwen3-235B-A22B, supervised fine-tuning on OpenHermes 2.5, 4 nodes x 8 GPUs.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-235B-A22B.sh"

: "${NODES:=4}" "${TP:=4}" "${CP:=1}" "${EP:=32}" "${MAX_TOKENS:=9216}"

CLUSTER_ARGS=(
    --actor-num-nodes "$NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-235B-A22B"
    --load "$BASE_DIR/Qwen3-235B-A22B_sft"
    --save "$BASE_DIR/Qwen3-235B-A22B_sft"
    --save-interval 1000
)

ROLLOUT_ARGS=(
    --prompt-data "$BASE_DIR/openhermes2_5/openhermes2_5.parquet"
    --input-key messages --rollout-shuffle
    --loss-mask-type qwen3
    --num-epoch 3
    --rollout-batch-size 128 --global-batch-size 128
)

# One expert-parallel group over all GPUs needs no pipeline: every GPU has 4 of the 128 experts of every layer.
PERF_ARGS+=(
    --tensor-model-parallel-size "$TP" --sequence-parallel
    --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    --max-tokens-per-gpu "$MAX_TOKENS"
)

launch train_async.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${SFT_ARGS[@]}" "${SFT_OPTIMIZER_ARGS[@]}" "${CPU_ADAM_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
