# qwen2.5-32B: Qwen/Qwen2.5-32B, Qwen/Qwen2.5-32B-Instruct
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 64 --hidden-size 5120 --ffn-hidden-size 27648 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5
    --num-attention-heads 40 --group-query-attention --num-query-groups 8 --add-qkv-bias
    --position-embedding-type rope --rotary-base 1000000
    --vocab-size 152064 --untie-embeddings-and-output-weights
)
