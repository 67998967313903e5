#!/usr/bin/env bash
# Qwen3-8B on one node of 8 GPUs, distilled on-policy: a teacher of another size (Qwen3-32B) answers from an SGLang server.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen3-8B.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate --rollout-num-gpus-per-engine 2
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen3-8B"
    --load "$BASE_DIR/Qwen3-8B_slime_opd" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen3-8B_slime_opd"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "$BASE_DIR/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --num-rollout 300
    --rollout-batch-size 16 --n-samples-per-prompt 4 --global-batch-size 64
    --rollout-max-response-len 16384
    --rollout-temperature 1
)

DISTILLATION_ARGS=(
    --use-opd --opd-type sglang --opd-kl-coef 1.0
    --rm-url "${TEACHER_URL:-http://127.0.0.1:13141/generate}"
    --custom-rm-path slime.rollout.on_policy_distillation.reward_func
    --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards
)

PERF_ARGS+=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --max-tokens-per-gpu 16384
)

SGLANG_ARGS=(
    --sglang-mem-fraction-static 0.6
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${DISTILLATION_ARGS[@]}" "${PERF_ARGS[@]}" --advantage-estimator grpo "${OPTIMIZER_ARGS[@]}" \
    "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
