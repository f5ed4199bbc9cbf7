# OLMo 3 7B: norms after attention and MLP, sliding windows in three of four layers, YaRN in the others
MODEL_ARGS=(
    --spec slime_plugins.models.olmo3 get_olmo3_spec
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 11008
    --vocab-size 100278

    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 32
    --kv-channels 128
    --qk-layernorm
    --window-size 4095,0
    --window-attn-skip-freq 4

    --position-embedding-type yarn
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-500000}"
    --rotary-scaling-factor 8
    --original-max-position-embeddings 8192
    --beta-fast 32
    --beta-slow 1

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --post-self-attn-layernorm
    --post-mlp-layernorm
    --norm-epsilon 1e-6
    --untie-embeddings-and-output-weights
)
