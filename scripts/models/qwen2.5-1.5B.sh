# qwen2.5-1.5B: Qwen/Qwen2.5-1.5B, Qwen/Qwen2.5-1.5B-Instruct and 1 more
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 28 --hidden-size 1536 --ffn-hidden-size 8960 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --num-attention-heads 12 --group-query-attention --num-query-groups 2 --add-qkv-bias
    --position-embedding-type rope --rotary-base 1000000
    --vocab-size 151936
)
