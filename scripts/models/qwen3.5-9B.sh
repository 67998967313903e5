# qwen3.5-9B: Qwen/Qwen3.5-9B
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --spec "slime_plugins.models.qwen3_5" "get_qwen3_5_spec"
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 12288 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p
    --num-attention-heads 16 --group-query-attention --num-query-groups 4 --kv-channels 256 --qk-layernorm
    --use-gated-attention --attention-output-gate
    --position-embedding-type rope --rotary-base 10000000 --rotary-percent 0.25
    --vocab-size 248320 --untie-embeddings-and-output-weights
)
