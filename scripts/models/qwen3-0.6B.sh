# qwen3-0.6B: Qwen/Qwen3-0.6B, Qwen/Qwen3-0.6B-Base
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --num-attention-heads 16 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm
    --position-embedding-type rope --rotary-base 1000000
    --vocab-size 151936
)
