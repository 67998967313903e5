# mimo-7B-rl: XiaomiMiMo/MiMo-7B-RL, XiaomiMiMo/MiMo-7B-SFT and 1 more
# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
    --num-layers 36 --hidden-size 4096 --ffn-hidden-size 11008 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --add-qkv-bias
    --position-embedding-type rope --rotary-base 640000
    --vocab-size 151680 --untie-embeddings-and-output-weights --max-position-embeddings 32768
    --mtp-num-layers 1
)
