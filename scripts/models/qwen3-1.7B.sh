# qwen3-1.7B: Qwen/Qwen3-1.7B, Qwen/Qwen3-1.7B-Base
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# MODEL_ARGS_ROTARY_BASE, set before this is sourced, is for checkpoints with another base.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 28 --hidden-size 2048 --ffn-hidden-size 6144 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --num-attention-heads 16 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm
    --position-embedding-type rope --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936
)
