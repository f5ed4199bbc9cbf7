# Qwen2.5 0.5B
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 896
    --ffn-hidden-size 4864
    --vocab-size 151936

    --num-attention-heads 14
    --group-query-attention
    --num-query-groups 2
    --add-qkv-bias

    --use-rotary-position-embeddings
    --rotary-base 1000000

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
)
