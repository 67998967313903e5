# glm4.5-355B-A32B: zai-org/GLM-4.5, zai-org/GLM-4.5-Base and 2 more
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 92 --hidden-size 5120 --ffn-hidden-size 12288 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5
    --num-attention-heads 96 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm
    --add-qkv-bias
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 0.5
    --vocab-size 151552 --untie-embeddings-and-output-weights
    --num-experts 160 --moe-router-topk 8 --moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 1536
    --moe-layer-freq '[0]*3+[1]*89' --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-pre-softmax
    --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 --moe-aux-loss-coeff 0 --moe-router-bias-update-rate 0
    --moe-router-load-balancing-type seq_aux_loss
)
