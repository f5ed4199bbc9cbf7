# Llama 3.1 8B Instruct
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --vocab-size 128256
    --max-position-embeddings 131072

    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128

    --use-rotary-position-embeddings
    --rotary-base 500000
    --use-rope-scaling
    --rope-scaling-factor 8.0

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --untie-embeddings-and-output-weights
)
