# GLM-4 / GLM-Z1 9B
MODEL_ARGS=(
    --spec slime_plugins.models.glm4 get_glm_spec
    --num-layers 40
    --hidden-size 4096
    --ffn-hidden-size 13696
    --vocab-size 151552

    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 2
    --add-qkv-bias

    --use-rotary-position-embeddings
    --rotary-interleaved
    --rotary-percent 0.5
    --rotary-base 10000
    --no-rope-fusion

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --post-self-attn-layernorm
    --post-mlp-layernorm
    --untie-embeddings-and-output-weights
)
