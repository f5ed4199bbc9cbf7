# Qwen2.5 1.5B
# The rotary base is Qwen2.5-Math's and its distillations'; for the general model set MODEL_ARGS_ROTARY_BASE=1000000.
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 1536
    --ffn-hidden-size 8960
    --vocab-size 151936

    --num-attention-heads 12
    --group-query-attention
    --num-query-groups 2
    --add-qkv-bias

    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000}"

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
)
