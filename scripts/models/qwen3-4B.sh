# qwen3-4B: Qwen/Qwen3-4B, Qwen/Qwen3-4B-Base
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# MODEL_ARGS_ROTARY_BASE, set before this is sourced, is for checkpoints with another base.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm
    --position-embedding-type rope --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936
)
