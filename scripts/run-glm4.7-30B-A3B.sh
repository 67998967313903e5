#!/usr/bin/env bash
# GLM-4.7-Flash (30B, 3B active), GRPO on one node of 8 GPUs that training and generation share. Engines draft with the
# model's multi-token-prediction layer, which is trained along so that drafts stay good.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/glm4.7-30B-A3B.sh"

# Two stages leave four GPUs for the experts of each; on two nodes (NODES=2) it is EP=8.
: "${NODES:=1}" "${TP:=2}" "${PP:=2}" "${LAST_STAGE:=23}" "${CP:=2}" "${EP:=4}"
: "${ENGINE_GPUS:=4}" "${MAX_TOKENS:=8192}"

CLUSTER_ARGS=(
    --actor-num-nodes "$NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/GLM-4.7-Flash"
    --load "$BASE_DIR/GLM-4.7-Flash_slime"
    --save "$BASE_DIR/GLM-4.7-Flash_slime"
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

# 47 layers: 24 + 23, the last stage having output and prediction layer besides.
PERF_ARGS+=(
    --tensor-model-parallel-size "$TP" --sequence-parallel
    --pipeline-model-parallel-size "$PP" --decoder-last-pipeline-num-layers "$LAST_STAGE"
    --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    --max-tokens-per-gpu "$MAX_TOKENS"
)

MTP_ARGS=(
    --mtp-num-layers 1 --enable-mtp-training
    --mtp-loss-scaling-factor 0.2 # enough to follow the policy, too little to lead it
)

OPTIMIZER_ARGS+=("${CPU_ADAM_ARGS[@]}")

# 20 attention heads: an engine has 1, 2 or 4 GPUs.
SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    --sglang-mem-fraction-static 0.7
    "${EAGLE_ARGS[@]}"
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${MTP_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" "$@"
