# qwen3.5-0.8B: Qwen/Qwen3.5-0.8B
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --spec "slime_plugins.models.qwen3_5" "get_qwen3_5_spec"
    --num-layers 24 --hidden-size 1024 --ffn-hidden-size 3584 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p
    --num-attention-heads 8 --group-query-attention --num-query-groups 2 --kv-channels 256 --qk-layernorm
    --use-gated-attention --attention-output-gate
    --position-embedding-type rope --rotary-base 10000000 --rotary-percent 0.25
    --vocab-size 248320
)
