# Mistral Small 3.1 and 3.2, 24B: the text model
MODEL_ARGS=(
    --num-layers 40
    --hidden-size 5120
    --ffn-hidden-size 32768
    --vocab-size 131072

    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128

    --position-embedding-type rope
    --rotary-percent 1.0
    --rotary-base 1000000000

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --untie-embeddings-and-output-weights
)
