# Qwen2.5-VL 7B: the language model; the vision tower follows from config.json
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --vocab-size 152064

    --num-attention-heads 28
    --group-query-attention
    --num-query-groups 4
    --add-qkv-bias

    --use-rotary-position-embeddings
    --rotary-base 1000000

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --untie-embeddings-and-output-weights
)
