# Qwen3.5 27B: gated delta net and gated attention; Qwen3.6 of this size has the same layers
MODEL_ARGS=(
    --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 17408
    --vocab-size 248320

    --num-attention-heads 24
    --group-query-attention
    --num-query-groups 4
    --kv-channels 256
    --qk-layernorm
    --attention-output-gate
    --linear-attention-freq 4
    --linear-num-value-heads 48

    --position-embedding-type rope
    --rotary-percent 0.25
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000000}"

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --apply-layernorm-1p
    --norm-epsilon 1e-6
    --untie-embeddings-and-output-weights
)
