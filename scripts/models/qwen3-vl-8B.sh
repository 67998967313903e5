# qwen3-vl-8B: the whole vision-language model of Qwen/Qwen3-VL-8B-Instruct, Qwen/Qwen3-VL-8B-Thinking
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --spec "slime_plugins.models.qwen3_vl" "get_qwen3_vl_model_provider"
    --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm
    --position-embedding-type rope --rotary-base 5000000
    --vocab-size 151936 --untie-embeddings-and-output-weights
)
