# Qwen3.5 0.8B: gated delta net and gated attention
MODEL_ARGS=(
    --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec
    --num-layers 24
    --hidden-size 1024
    --ffn-hidden-size 3584
    --vocab-size 248320

    --num-attention-heads 8
    --group-query-attention
    --num-query-groups 2
    --kv-channels 256
    --qk-layernorm
    --attention-output-gate
    --linear-attention-freq 4
    --linear-num-value-heads 16

    --position-embedding-type rope
    --rotary-percent 0.25
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000000}"

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --apply-layernorm-1p
    --norm-epsilon 1e-6
)
