# Llama 3.2 1B Instruct
MODEL_ARGS=(
    --num-layers 16
    --hidden-size 2048
    --ffn-hidden-size 8192
    --vocab-size 128256
    --max-position-embeddings 131072

    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 64

    --use-rotary-position-embeddings
    --rotary-base 500000
    --use-rope-scaling
    --rope-scaling-factor 32.0

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
)
