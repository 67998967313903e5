# shellcheck shell=bash disable=SC2034  # the arrays are for the scripts that source this file
# What the recipes have in common. A script sources this file, then the flags of its model, and adds what is its own:
# of two equal flags the last one counts, so ARRAY+=(...) changes a value as well.

SCRIPTS=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
source "$SCRIPTS/lib/launch.sh"

# Checkpoints, data and results lie below this directory; for several nodes, on a file system that they share.
BASE_DIR=${BASE_DIR:-/root}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}

# Clip-higher: more room upwards (0.28) than downwards (0.2) keeps unlikely tokens alive. A KL weight of 0 means that
# the distance to the first weights is measured and logged, not punished; without --use-kl-loss no reference model is
# held, and its forward pass is saved.
GRPO_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
    --entropy-coef 0.00
    --eps-clip 0.2 --eps-clip-high 0.28
)

# GSPO clips the ratio of whole sequences, which stays much closer to 1 than that of tokens. No reference model.
GSPO_ARGS=(
    --advantage-estimator gspo
    --entropy-coef 0.00
    --eps-clip 4e-4
)

# Gradients of RL are noisy and its steps small: no warm-up, no decay, and a second moment that forgets sooner (0.98).
OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6 --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.98
)

# Adam's states in host memory: 12 bytes per parameter that GPUs need not hold, for a slower optimizer step.
CPU_ADAM_ARGS=(
    --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
)

# Activations are recomputed layer by layer, so that long responses fit; micro-batches are packed up to
# --max-tokens-per-gpu, which every recipe sets, and spread evenly over the data-parallel ranks.
PERF_ARGS=(
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --use-dynamic-batch-size --balance-data
)

# Dropout would make the trainer's log-probs differ from the engine's. Sums over many tokens and many ranks are in fp32.
MISC_ARGS=(
    --attention-dropout 0.0 --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

# The checkpoint's own multi-token-prediction layer drafts three tokens ahead; the model accepts or corrects them, which
# makes generation faster and leaves the distribution of its tokens as it is.
EAGLE_ARGS=(
    --sglang-speculative-algorithm EAGLE
    --sglang-speculative-num-steps 3 --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 4
)

# Engines of many GPUs. Attention runs in data-parallel groups (a script says how many with --sglang-dp-size), so that
# the cache of a sequence is held once per group and not once per GPU.
DP_ATTENTION_ARGS=(
    --sglang-enable-dp-attention --sglang-enable-dp-lm-head --sglang-moe-dense-tp-size 1
)

# Experts are spread over all GPUs of an engine, and DeepEP carries the tokens to them and back.
DEEPEP_ARGS=(
    --sglang-moe-a2a-backend deepep --sglang-deepep-mode auto
)

# Supervised fine-tuning: conversations instead of generated responses, so no engines, no advantages, and a mean over
# all tokens instead of over samples.
SFT_ARGS=(
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout
    --loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns
    --debug-train-only
)

# A tenth of the run to warm up, then down to a tenth of the peak along a cosine.
SFT_OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-5 --lr-decay-style cosine --min-lr 1e-6 --lr-warmup-fraction 0.1
    --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95
)

# Matrix products of the trainer in block-wise FP8, as the engines compute them; its weights are bf16.
FP8_ARGS=(
    --transformer-impl transformer_engine --bf16
    --fp8-format e4m3 --fp8-recipe blockwise
)

# Quantization-aware training: the trainer computes with experts rounded to INT4 in groups, as the engine has them, and
# applies the gradients to the exact ones.
INT4_QAT_ARGS=(
    --train-env-vars
    "{\"OPEN_TRAINING_INT4_FAKE_QAT_FLAG\": \"1\", \"OPEN_TRAINING_INT4_GROUP_SIZE\": \"${INT4_GROUP_SIZE:-128}\"}"
)
