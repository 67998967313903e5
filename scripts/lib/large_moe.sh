# shellcheck shell=bash disable=SC2034,SC2153  # the arrays are for the scripts, the variables are theirs
# The recipe of the mixtures of experts that need many nodes: mathematics with dynamic sampling, experts over many GPUs,
# Adam on the host. A script sources this file after lib/recipe.sh and after setting what differs from model to model:
#
#   NODES TP PP CP EP         layout of the trainer; MAX_TOKENS per GPU and the engines are the script's own
#   FIRST_STAGE, LAST_STAGE   layers of the first and the last pipeline stage; empty where they have as many as others
#   RM_TYPE                   --rm-type
#   ROLLOUT_BATCH_SIZE        prompts of a rollout; with 8 responses each, they are the batch of one optimizer step
#   MAX_RESPONSE_LEN, EVAL_MAX_RESPONSE_LEN
#                             tokens of a response, in training and in evaluation
#
# The script adds --colocate or GPUs for the engines to CLUSTER_ARGS, and what else it needs to the others.

CLUSTER_ARGS=(
    --actor-num-nodes "$NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE"
)

# Groups whose rewards are all equal teach nothing and are replaced: twice the prompts are in flight to find enough good
# ones.
ROLLOUT_ARGS=(
    --prompt-data "$BASE_DIR/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type "$RM_TYPE"
    --num-rollout 3000
    --rollout-batch-size "$ROLLOUT_BATCH_SIZE" --n-samples-per-prompt 8
    --global-batch-size "$((8 * ROLLOUT_BATCH_SIZE))"
    --over-sampling-batch-size "$((2 * ROLLOUT_BATCH_SIZE))"
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --rollout-max-response-len "$MAX_RESPONSE_LEN"
    --rollout-temperature 1
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data aime "$BASE_DIR/aime-2024/aime-2024.jsonl"
    --n-samples-per-eval-prompt 8
    --eval-max-response-len "$EVAL_MAX_RESPONSE_LEN"
)

PERF_ARGS+=(
    --tensor-model-parallel-size "$TP" --sequence-parallel
    --pipeline-model-parallel-size "$PP" ${FIRST_STAGE:+--decoder-first-pipeline-num-layers "$FIRST_STAGE"}
    ${LAST_STAGE:+--decoder-last-pipeline-num-layers "$LAST_STAGE"}
    --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
)

OPTIMIZER_ARGS+=("${CPU_ADAM_ARGS[@]}")

# For the scripts that name it: where scores are close, engine and trainer choose different experts; importance weights,
# at most 2, correct for it.
TIS_ARGS=(--use-tis --tis-clip 2.0)
