# Qwen2.5 3B
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 2048
    --ffn-hidden-size 11008
    --vocab-size 151936

    --num-attention-heads 16
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
