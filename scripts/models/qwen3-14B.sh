# qwen3-14B: Qwen/Qwen3-14B, Qwen/Qwen3-14B-Base
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 40 --hidden-size 5120 --ffn-hidden-size 17408 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --num-attention-heads 40 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm
    --position-embedding-type rope --rotary-base 1000000
    --vocab-size 151936 --untie-embeddings-and-output-weights
)
