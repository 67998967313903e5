# qwen3-32B: Qwen/Qwen3-32B
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 64 --hidden-size 5120 --ffn-hidden-size 25600 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm
    --position-embedding-type rope --rotary-base 1000000
    --vocab-size 151936 --untie-embeddings-and-output-weights
)
