#!/usr/bin/env bash
# MemAgent: Qwen2.5-7B-Instruct learns to read long documents in chunks, on four nodes of 8 GPUs.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/recipe.sh"
source "$SCRIPTS/models/qwen2.5-7B.sh"

CLUSTER_ARGS=(
    --actor-num-nodes 4 --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen2.5-7B-Instruct"
    --load "$BASE_DIR/Qwen2.5-7B-Instruct_memagent" # an interrupted run resumes from here
    --save "$BASE_DIR/Qwen2.5-7B-Instruct_memagent"
    --save-interval 20
)

# 128 questions with 16 executions each, of up to nine conversations; steps of 8 questions.
ROLLOUT_ARGS=(
    --custom-generate-function-path examples.memagent.rollout.generate
    --custom-rm-path examples.memagent.rollout.reward_func
    --custom-config-path "$SCRIPTS/../examples/memagent/memagent.yaml"
    --prompt-data "$BASE_DIR/memagent/train.jsonl"
    --input-key messages --label-key label --rollout-shuffle
    --num-epoch 30
    --rollout-batch-size 128 --n-samples-per-prompt 16 --global-batch-size 128
    --rollout-max-context-len 8192 --rollout-max-response-len 1024 # of a conversation
    --rollout-temperature 1
)

# The questions of HotpotQA among 50, 200, 800 and 3200 documents: 7K, 28K, 112K and 448K tokens.
EVAL_ARGS=(
    --custom-eval-rollout-log-function-path examples.memagent.rollout.eval_log
    --eval-interval 20
    --eval-prompt-data
    hqa_7k "$BASE_DIR/memagent/eval_50.jsonl" hqa_28k "$BASE_DIR/memagent/eval_200.jsonl"
    hqa_112k "$BASE_DIR/memagent/eval_800.jsonl" hqa_448k "$BASE_DIR/memagent/eval_3200.jsonl"
    --n-samples-per-eval-prompt 4
    --eval-temperature 0.7 --eval-top-p 0.95
)

PERF_ARGS+=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --max-tokens-per-gpu 16384
)

# The loss is a mean over all tokens of the step, and rewards are not divided by their deviation.
MEMAGENT_ARGS=(
    --calculate-per-token-loss --disable-grpo-std-normalization
    --kl-loss-coef 0.001 --eps-clip-high 0.2
    --lr-warmup-iters 20
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.7
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${MEMAGENT_ARGS[@]}" "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" "$@"
