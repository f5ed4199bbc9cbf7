# Gemma 3 1B (text): sliding windows in five of six layers, norms around attention and MLP; --swiglu enables its gate
MODEL_ARGS=(
    --spec slime_plugins.models.gemma3 get_gemma3_spec
    --num-layers 26
    --hidden-size 1152
    --ffn-hidden-size 6912
    --vocab-size 262144

    --num-attention-heads 4
    --group-query-attention
    --num-query-groups 1
    --kv-channels 256
    --qk-layernorm
    --window-size 511,0
    --window-attn-skip-freq 6

    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --apply-layernorm-1p
    --post-self-attn-layernorm
    --post-mlp-layernorm
    --norm-epsilon 1e-6
)
