# qwen2.5-3B: Qwen/Qwen2.5-3B, Qwen/Qwen2.5-3B-Instruct
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --num-attention-heads 16 --group-query-attention --num-query-groups 2 --add-qkv-bias
    --position-embedding-type rope --rotary-base 1000000
    --vocab-size 151936
)
