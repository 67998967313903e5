# llama3.1-8B-Instruct: meta-llama/Llama-3.1-8B-Instruct, meta-llama/Llama-3.1-8B
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --position-embedding-type rope --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8
    --vocab-size 128256 --untie-embeddings-and-output-weights --max-position-embeddings 131072
)
