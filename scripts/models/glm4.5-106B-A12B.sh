# glm4.5-106B-A12B: zai-org/GLM-4.5-Air, zai-org/GLM-4.5-Air-Base
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 46 --hidden-size 4096 --ffn-hidden-size 10944 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5
    --num-attention-heads 96 --group-query-attention --num-query-groups 8 --kv-channels 128 --add-qkv-bias
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 0.5
    --vocab-size 151552 --untie-embeddings-and-output-weights
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 1408
    --moe-layer-freq '[0]*1+[1]*45' --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-pre-softmax --moe-router-dtype fp32
    --moe-aux-loss-coeff 0 --moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss
)
