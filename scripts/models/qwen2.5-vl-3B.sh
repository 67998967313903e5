# qwen2.5-vl-3B: the whole vision-language model of Qwen/Qwen2.5-VL-3B-Instruct
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --spec "slime_plugins.models.qwen2_5_vl" "get_qwen2_5_vl_model_provider"
    --num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --num-attention-heads 16 --group-query-attention --num-query-groups 2 --add-qkv-bias
    --position-embedding-type rope --rotary-base 1000000
    --vocab-size 151936
)
