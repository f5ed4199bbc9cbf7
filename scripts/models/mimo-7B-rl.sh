# MiMo 7B RL: Qwen2's layers and one layer of multi-token prediction
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 4096
    --ffn-hidden-size 11008
    --vocab-size 151680
    --max-position-embeddings 32768

    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --add-qkv-bias

    --use-rotary-position-embeddings
    --rotary-base 640000

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --untie-embeddings-and-output-weights

    --mtp-num-layers 1
)
