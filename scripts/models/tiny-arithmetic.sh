# The Qwen3 model of examples/tiny_arithmetic: 0.3 million parameters.
MODEL_ARGS=(
    --swiglu
    --num-layers 2
    --hidden-size 128
    --ffn-hidden-size 256
    --num-attention-heads 4
    --group-query-attention
    --num-query-groups 2
    --kv-channels 32
    --qk-layernorm
    --use-rotary-position-embeddings
    --rotary-base 10000
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --vocab-size 128
    --untie-embeddings-and-output-weights
)
