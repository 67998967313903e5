#!/usr/bin/env bash
# DeepSeek-R1 (671B, 37B active), GRPO on 16 nodes x 8 GPUs that training and generation share.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/deepseek-v3.sh"

: "${NODES:=16}" "${TP:=8}" "${PP:=4}" "${LAST_STAGE:=13}" "${CP:=4}" "${EP:=32}"
: "${ENGINE_GPUS:=64}" "${ENGINE_DP:=8}" "${MAX_TOKENS:=16384}"

CLUSTER_ARGS=(
    --actor-num-nodes "$NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

# Engines serve the FP8 checkpoint and get FP8 weights at every sync; the trainer starts from its bf16 version.
CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/DeepSeek-R1"
    --ref-load "$BASE_DIR/DeepSeek-R1-bf16"
    --load "$BASE_DIR/DeepSeek-R1_slime"
    --save "$BASE_DIR/DeepSeek-R1_slime"
    --save-interval 20
)

# Groups whose rewards are all equal teach nothing and are replaced: twice the prompts are in flight to find 128 good
# ones.
ROLLOUT_ARGS=(
    --prompt-data "$BASE_DIR/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 3000
    --rollout-batch-size 128 --n-samples-per-prompt 8 --global-batch-size 1024
    --over-sampling-batch-size 256
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --rollout-max-response-len 32768
    --rollout-temperature 1
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data aime "$BASE_DIR/aime-2024/aime-2024.jsonl"
    --n-samples-per-eval-prompt 8
    --eval-max-response-len 32768
)

# 61 layers: 16 + 16 + 16 + 13, the last stage having the output layer besides.
PERF_ARGS+=(
    --tensor-model-parallel-size "$TP" --sequence-parallel
    --pipeline-model-parallel-size "$PP" --decoder-last-pipeline-num-layers "$LAST_STAGE"
    --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    --moe-enable-deepep --moe-token-dispatcher-type flex
    --max-tokens-per-gpu "$MAX_TOKENS"
)

OPTIMIZER_ARGS+=("${CPU_ADAM_ARGS[@]}")

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    --sglang-mem-fraction-static 0.7
    "${DP_ATTENTION_ARGS[@]}" --sglang-dp-size "$ENGINE_DP"
    "${DEEPEP_ARGS[@]}"
    "${EAGLE_ARGS[@]}"
    --sglang-server-concurrency 1024 # 128 requests for each data-parallel group of an engine
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
