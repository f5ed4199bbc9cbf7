# GLM-4 / GLM-Z1 32B
MODEL_ARGS=(
    --spec slime_plugins.models.glm4 get_glm_spec
    --num-layers 61
    --hidden-size 6144
    --ffn-hidden-size 23040
    --vocab-size 151552
    --seq-length 32768
    --max-position-embeddings 32768

    --num-attention-heads 48
    --group-query-attention
    --num-query-groups 2

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
