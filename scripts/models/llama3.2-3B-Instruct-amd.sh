# llama3.2-3B-Instruct-amd: meta-llama/Llama-3.2-3B-Instruct, meta-llama/Llama-3.2-3B
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 28 --hidden-size 3072 --ffn-hidden-size 8192 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5
    --num-attention-heads 24 --group-query-attention --num-query-groups 8 --kv-channels 128
    --position-embedding-type rope --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32
    --vocab-size 128256 --max-position-embeddings 131072
)
