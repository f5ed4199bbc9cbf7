# Qwen3 4B
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 2560
    --ffn-hidden-size 9728
    --vocab-size 151936

    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --qk-layernorm

    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
)
