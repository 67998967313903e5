# qwen3-vl-30B-A3B: the whole vision-language model of Qwen/Qwen3-VL-30B-A3B-Instruct, Qwen/Qwen3-VL-30B-A3B-Thinking
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --spec "slime_plugins.models.qwen3_vl" "get_qwen3_vl_moe_model_provider"
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm
    --position-embedding-type rope --rotary-base 5000000
    --vocab-size 151936 --untie-embeddings-and-output-weights
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-layer-freq '[1]*48' --moe-grouped-gemm
    --moe-permute-fusion --moe-token-dispatcher-type alltoall
    --moe-router-score-function softmax --moe-router-dtype fp32 --moe-aux-loss-coeff 0 --moe-token-drop-policy probs
)
