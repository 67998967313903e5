# glm4.7-30B-A3B: zai-org/GLM-4.7-Flash
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 47 --hidden-size 2048 --ffn-hidden-size 10240 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5
    --multi-latent-attention --num-attention-heads 20 --q-lora-rank 768 --kv-lora-rank 512 --qk-head-dim 192
    --qk-pos-emb-head-dim 64 --v-head-dim 256 --kv-channels 192 --qk-layernorm
    --position-embedding-type rope --rotary-base 1000000 --rotary-scaling-factor 1 --no-rope-fusion
    --no-position-embedding
    --vocab-size 154880 --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 64
    --num-experts 64 --moe-router-topk 4 --moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 1536
    --moe-layer-freq '[0]*1+[1]*46' --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-pre-softmax
    --moe-router-topk-scaling-factor 1.8 --moe-router-dtype fp32 --moe-aux-loss-coeff 0 --moe-router-bias-update-rate 0
    --moe-router-load-balancing-type seq_aux_loss
)
