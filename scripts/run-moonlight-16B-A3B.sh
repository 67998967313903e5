#!/usr/bin/env bash
# Moonlight-16B-A3B-Instruct (latent attention, 64 experts), GRPO on one node of 8 GPUs that training and generation
# share. Small enough to try here what DeepSeek-V3 and Kimi K2 need many nodes for.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/moonlight.sh"

: "${NODES:=1}" "${TP:=4}" "${CP:=1}" "${EP:=8}" "${ENGINE_GPUS:=8}" "${ENGINE_DP:=8}" "${MAX_TOKENS:=8192}"

CLUSTER_ARGS=(
    --actor-num-nodes "$NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Moonlight-16B-A3B-Instruct" --trust-remote-code # its tokenizer is code of its own
    --load "$BASE_DIR/Moonlight-16B-A3B-Instruct_slime"
    --save "$BASE_DIR/Moonlight-16B-A3B-Instruct_slime"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "$BASE_DIR/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type math
    --num-rollout 3000
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --over-sampling-batch-size 64
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --rollout-max-response-len 4096
    --rollout-temperature 1
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data aime "$BASE_DIR/aime-2024/aime-2024.jsonl"
    --n-samples-per-eval-prompt 8
    --eval-max-response-len 4096 # with the prompt, close to the 8192 tokens that the model knows
)

PERF_ARGS+=(
    --tensor-model-parallel-size "$TP" --sequence-parallel
    --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    --moe-enable-deepep --moe-token-dispatcher-type flex
    --max-tokens-per-gpu "$MAX_TOKENS"
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    --sglang-mem-fraction-static 0.7
    "${DP_ATTENTION_ARGS[@]}" --sglang-dp-size "$ENGINE_DP"
    "${DEEPEP_ARGS[@]}"
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
