# Llama 3.2 3B Instruct
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 3072
    --ffn-hidden-size 8192
    --vocab-size 128256
    --max-position-embeddings 131072

    --num-attention-heads 24
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128

    --use-rotary-position-embeddings
    --rotary-base 500000
    --use-rope-scaling
    --rope-scaling-factor 32.0

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
)
