# Gemma 4 31B (text): sliding windows in five of six layers, norms around attention and MLP; --swiglu enables its gate.
# The other layers' heads, and other per-layer settings, are read from config.json.
MODEL_ARGS=(
    --spec slime_plugins.models.gemma4 get_gemma4_spec
    --num-layers 60
    --hidden-size 5376
    --ffn-hidden-size 21504
    --vocab-size 262144

    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 16
    --kv-channels 256
    --qk-layernorm
    --softmax-scale 1
    --window-size 1023,0
    --window-attn-skip-freq 6

    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --post-self-attn-layernorm
    --post-mlp-layernorm
    --norm-epsilon 1e-6
)
