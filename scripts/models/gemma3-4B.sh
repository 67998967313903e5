# gemma3-4B: the language model of google/gemma-3-4b-it, google/gemma-3-4b-pt
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --spec "slime_plugins.models.gemma3" "get_gemma3_model_provider"
    --num-layers 34 --hidden-size 2560 --ffn-hidden-size 10240 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p --post-self-attn-layernorm --post-mlp-layernorm
    --num-attention-heads 8 --group-query-attention --num-query-groups 4 --kv-channels 256 --qk-layernorm
    --position-embedding-type rope --rotary-base 1000000
    --vocab-size 262208
)
