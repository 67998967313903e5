# glm5.2-744B-A40B: zai-org/GLM-5.2
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --spec "slime_plugins.models.glm5.glm5" "get_glm5_spec"
    --num-layers 78 --hidden-size 6144 --ffn-hidden-size 12288 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5
    --multi-latent-attention --num-attention-heads 64 --q-lora-rank 2048 --kv-lora-rank 512 --qk-head-dim 192
    --qk-pos-emb-head-dim 64 --v-head-dim 256 --kv-channels 192 --qk-layernorm
    --position-embedding-type rope --rotary-base 8000000 --rotary-scaling-factor 1 --no-position-embedding
    --vocab-size 154880 --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 16
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
    --moe-layer-freq '[0]*3+[1]*75' --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-pre-softmax
    --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 --moe-aux-loss-coeff 0 --moe-router-bias-update-rate 0
    --moe-router-load-balancing-type seq_aux_loss
)
