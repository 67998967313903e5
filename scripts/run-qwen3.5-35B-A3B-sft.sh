#!/usr/bin/env bash
# Qwen3.5-35B-A3B (256 experts, three of four layers with linear attention), supervised fine-tuning on OpenHermes 2.5,
# one node of 8 GPUs.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/qwen3.5-35B-A3B.sh"

: "${NODES:=1}" "${TP:=2}" "${CP:=1}" "${EP:=8}" "${MAX_TOKENS:=9216}"

CLUSTER_ARGS=(
    --actor-num-nodes "$NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3.5-35B-A3B"
    --load "$BASE_DIR/Qwen3.5-35B-A3B_sft"
    --save "$BASE_DIR/Qwen3.5-35B-A3B_sft"
    --save-interval 1000
)

ROLLOUT_ARGS=(
    --prompt-data "$BASE_DIR/openhermes2_5/openhermes2_5.parquet"
    --input-key messages --rollout-shuffle
    --loss-mask-type qwen3_5
    --num-epoch 3
    --rollout-batch-size 128 --global-batch-size 128
)

# Two groups of keys and values: tensor parallelism ends at 2.
PERF_ARGS+=(
    --tensor-model-parallel-size "$TP" --sequence-parallel
    --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    --max-tokens-per-gpu "$MAX_TOKENS"
)

launch train_async.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${SFT_ARGS[@]}" "${SFT_OPTIMIZER_ARGS[@]}" "${CPU_ADAM_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
