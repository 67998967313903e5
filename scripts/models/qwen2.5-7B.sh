# qwen2.5-7B: Qwen/Qwen2.5-7B, Qwen/Qwen2.5-7B-Instruct and 1 more
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --num-attention-heads 28 --group-query-attention --num-query-groups 4 --add-qkv-bias
    --position-embedding-type rope --rotary-base 1000000
    --vocab-size 152064 --untie-embeddings-and-output-weights
)
