# gemma3-12B: the language model of google/gemma-3-12b-it, google/gemma-3-12b-pt
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --spec "slime_plugins.models.gemma3" "get_gemma3_model_provider"
    --num-layers 48 --hidden-size 3840 --ffn-hidden-size 15360 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p --post-self-attn-layernorm --post-mlp-layernorm
    --num-attention-heads 16 --group-query-attention --num-query-groups 8 --kv-channels 256 --qk-layernorm
    --position-embedding-type rope --rotary-base 1000000
    --vocab-size 262208
)
