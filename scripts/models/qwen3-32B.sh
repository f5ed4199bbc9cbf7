# Qwen3 32B
MODEL_ARGS=(
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 25600
    --vocab-size 151936

    --num-attention-heads 64
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
    --untie-embeddings-and-output-weights
)
