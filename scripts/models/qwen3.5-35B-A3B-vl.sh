# qwen3.5-35B-A3B-vl: the whole vision-language model of Qwen/Qwen3.5-35B-A3B
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --spec "slime_plugins.models.qwen3_5_vl" "get_qwen3_5_vl_model_provider"
    --num-layers 40 --hidden-size 2048 --ffn-hidden-size 512 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p
    --num-attention-heads 16 --group-query-attention --num-query-groups 2 --kv-channels 256 --qk-layernorm
    --use-gated-attention --attention-output-gate
    --position-embedding-type rope --rotary-base 10000000 --rotary-percent 0.25
    --vocab-size 248320 --untie-embeddings-and-output-weights
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512
    --moe-shared-expert-gate --moe-layer-freq '[1]*40' --moe-grouped-gemm --moe-permute-fusion
    --moe-token-dispatcher-type alltoall
    --moe-router-score-function softmax --moe-router-dtype fp32 --moe-aux-loss-coeff 0 --moe-token-drop-policy probs
)
