# gemma3-27B: the language model of google/gemma-3-27b-it, google/gemma-3-27b-pt
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --spec "slime_plugins.models.gemma3" "get_gemma3_model_provider"
    --num-layers 62 --hidden-size 5376 --ffn-hidden-size 21504 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p --post-self-attn-layernorm --post-mlp-layernorm
    --num-attention-heads 32 --group-query-attention --num-query-groups 16 --kv-channels 128 --qk-layernorm
    --position-embedding-type rope --rotary-base 1000000
    --vocab-size 262208
)
