# qwen3-235B-A22B: Qwen/Qwen3-235B-A22B, Qwen/Qwen3-235B-A22B-Instruct-2507 and 1 more
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# MODEL_ARGS_ROTARY_BASE, set before this is sourced, is for checkpoints with another base.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --num-attention-heads 64 --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm
    --position-embedding-type rope --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936 --untie-embeddings-and-output-weights
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536 --moe-layer-freq '[1]*94' --moe-grouped-gemm
    --moe-permute-fusion --moe-token-dispatcher-type alltoall
    --moe-router-score-function softmax --moe-router-dtype fp32 --moe-aux-loss-coeff 0 --moe-token-drop-policy probs
)
