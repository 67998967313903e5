# glm4-9B: zai-org/GLM-4-9B-0414, zai-org/GLM-Z1-9B-0414
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --spec "slime_plugins.models.glm4" "get_glm_spec"
    --num-layers 40 --hidden-size 4096 --ffn-hidden-size 13696 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5 --post-self-attn-layernorm --post-mlp-layernorm
    --num-attention-heads 32 --group-query-attention --num-query-groups 2 --kv-channels 128 --add-qkv-bias
    --position-embedding-type rope --rotary-base 10000 --rotary-percent 0.5 --rotary-interleaved --no-rope-fusion
    --vocab-size 151552 --untie-embeddings-and-output-weights
)
