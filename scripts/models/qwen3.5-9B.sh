# Qwen3.5 9B: gated delta net and gated attention
MODEL_ARGS=(
    --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 12288
    --vocab-size 248320

    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 4
    --kv-channels 256
    --qk-layernorm
    --attention-output-gate
    --linear-attention-freq 4

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
