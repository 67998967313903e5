# gpt-oss-120B: openai/gpt-oss-120b
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --spec "slime_plugins.models.gpt_oss" "get_gpt_oss_model_provider"
    --num-layers 36 --hidden-size 2880 --ffn-hidden-size 2880 --swiglu
    --normalization RMSNorm --norm-epsilon 1e-5
    --num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 64 --add-qkv-bias
    --position-embedding-type rope --rotary-base 150000
    --vocab-size 201088 --untie-embeddings-and-output-weights
    --num-experts 128 --moe-router-topk 4 --moe-ffn-hidden-size 2880 --moe-layer-freq '[1]*36' --moe-grouped-gemm
    --moe-permute-fusion --moe-token-dispatcher-type alltoall
    --moe-router-score-function softmax --moe-router-dtype fp32 --moe-aux-loss-coeff 0
)
