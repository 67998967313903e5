#!/usr/bin/env bash
# Qwen2.5-0.5B-Instruct on GSM8K, one node of 8 GPUs: two runs of this script give the same numbers, bit by bit.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
source "$SCRIPTS/models/qwen2.5-0.5B.sh"

: "${NODES:=1}" "${ENGINE_GPUS:=1}" "${MAX_TOKENS:=9216}"

CLUSTER_ARGS=(
    --actor-num-nodes "$NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
    --colocate
)

# No --load: every run begins at the same place.
CKPT_ARGS=(
    --hf-checkpoint "$BASE_DIR/Qwen2.5-0.5B-Instruct"
)

ROLLOUT_ARGS=(
    --prompt-data "$BASE_DIR/gsm8k/train.parquet"
    --input-key messages --label-key label --apply-chat-template --rollout-shuffle
    --rm-type math
    --num-rollout 100
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --rollout-max-response-len 1024
    --rollout-temperature 1
    --rollout-seed 42 --seed 1234
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data gsm8k "$BASE_DIR/gsm8k/test.parquet"
    --n-samples-per-eval-prompt 1
    --eval-max-response-len 1024
    --eval-top-k 1 # greedy
)

PERF_ARGS+=(
    --max-tokens-per-gpu "$MAX_TOKENS"
)

# The engine's results must not depend on which requests share a batch, nor on what the prefix cache holds.
SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    --sglang-mem-fraction-static 0.7
    --sglang-enable-deterministic-inference
    --sglang-attention-backend fa3 # of the backends with batch-invariant kernels, one that keeps the prefix cache
)

# The trainer's sums must be made in the same order: in its kernels, in cuBLAS and in NCCL.
MISC_ARGS+=(
    --deterministic-mode
    --train-env-vars
    '{"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}'
)

launch train.py "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
