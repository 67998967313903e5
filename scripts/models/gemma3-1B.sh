# gemma3-1B: google/gemma-3-1b-it, google/gemma-3-1b-pt
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --spec "slime_plugins.models.gemma3" "get_gemma3_model_provider"
    --num-layers 26 --hidden-size 1152 --ffn-hidden-size 6912 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p --post-self-attn-layernorm --post-mlp-layernorm
    --num-attention-heads 4 --group-query-attention --num-query-groups 1 --kv-channels 256 --qk-layernorm
    --position-embedding-type rope --rotary-base 1000000
    --vocab-size 262144
)
