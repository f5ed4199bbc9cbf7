# Qwen3 0.6B
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 1024
    --ffn-hidden-size 3072
    --vocab-size 151936

    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --qk-layernorm

    --use-rotary-position-embeddings
    --rotary-base 1000000

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
)
