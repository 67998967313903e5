# minimax-m2: MiniMaxAI/MiniMax-M2, MiniMaxAI/MiniMax-M2.1
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --spec "slime_plugins.models.minimax_m2" "get_minimax_m2_layer_spec"
    --num-layers 62 --hidden-size 3072 --ffn-hidden-size 1536 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --num-attention-heads 48 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm
    --attention-softmax-in-fp32
    --position-embedding-type rope --rotary-base 5000000 --rotary-percent 0.5 --no-rope-fusion
    --vocab-size 200064 --untie-embeddings-and-output-weights
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 1536 --moe-layer-freq '[1]*62' --moe-grouped-gemm
    --moe-permute-fusion --moe-token-dispatcher-type alltoall
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-pre-softmax --moe-router-dtype fp32
    --moe-aux-loss-coeff 0 --moe-router-load-balancing-type none
)
