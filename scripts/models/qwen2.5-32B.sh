# Qwen2.5 32B
# The epsilon of the norms is the base model's; for the instruct model set MODEL_ARGS_NORM_EPSILON=1e-6.
MODEL_ARGS=(
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 27648
    --vocab-size 152064

    --num-attention-heads 40
    --group-query-attention
    --num-query-groups 8
    --add-qkv-bias

    --use-rotary-position-embeddings
    --rotary-base 1000000

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon "${MODEL_ARGS_NORM_EPSILON:-1e-5}"
    --untie-embeddings-and-output-weights
)
