# deepseek-v3.2: deepseek-ai/DeepSeek-V3.2, deepseek-ai/DeepSeek-V3.2-Exp
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --spec "slime_plugins.models.deepseek_v32" "get_deepseek_v32_spec"
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --multi-latent-attention --num-attention-heads 128 --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
    --qk-pos-emb-head-dim 64 --v-head-dim 128 --kv-channels 128 --qk-layernorm --attention-softmax-in-fp32
    --position-embedding-type rope --rotary-base 10000 --rotary-scaling-factor 40 --mscale 1 --mscale-all-dim 1
    --no-rope-fusion
    --vocab-size 129280 --untie-embeddings-and-output-weights
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
    --moe-layer-freq '[0]*3+[1]*58' --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-pre-softmax
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
    --moe-aux-loss-coeff 0 --moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss
)
