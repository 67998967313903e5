# qwen2.5-0.5B: Qwen/Qwen2.5-0.5B, Qwen/Qwen2.5-0.5B-Instruct
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 24 --hidden-size 896 --ffn-hidden-size 4864 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --num-attention-heads 14 --group-query-attention --num-query-groups 2 --add-qkv-bias
    --position-embedding-type rope --rotary-base 1000000
    --vocab-size 151936
)
