# Seed-OSS 36B
MODEL_ARGS=(
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 27648
    --vocab-size 155136

    --num-attention-heads 80
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --add-qkv-bias

    --position-embedding-type rope
    --rotary-percent 1.0
    --rotary-base 10000000

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --untie-embeddings-and-output-weights
)
