#!/usr/bin/env bash
# GLM-5 (744B, 40B active, sparse attention), GRPO on 32 nodes x 8 GPUs that training and generation share. One engine
# of 64 GPUs reads prompts, three generate.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/glm5-744B-A40B.sh"

: "${NODES:=32}" "${TP:=4}" "${PP:=4}" "${LAST_STAGE:=18}" "${CP:=2}" "${EP:=32}"
: "${ENGINE_GPUS:=64}" "${ENGINE_DP:=8}" "${PREFILL_ENGINES:=1}" "${MAX_TOKENS:=20480}"

CLUSTER_ARGS=(
    --actor-num-nodes "$NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/GLM-5"
    --load "$BASE_DIR/GLM-5_slime"
    --save "$BASE_DIR/GLM-5_slime"
    --save-interval 20
)

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

# 78 layers: 20 + 20 + 20 + 18, the last stage having the output layer besides.
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
    --prefill-num-servers "$PREFILL_ENGINES"
    --sglang-mem-fraction-static 0.7
    "${DP_ATTENTION_ARGS[@]}" --sglang-dp-size "$ENGINE_DP"
    "${DEEPEP_ARGS[@]}"
    "${EAGLE_ARGS[@]}"
    --sglang-server-concurrency 1024
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
