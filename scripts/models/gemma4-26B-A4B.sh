# Gemma 4 26B-A4B (text): Gemma 4's layers, with experts beside each MLP, whose size is
# --moe-shared-expert-intermediate-size; --swiglu enables the gates of both.
MODEL_ARGS=(
    --spec slime_plugins.models.gemma4 get_gemma4_spec
    --num-layers 30
    --hidden-size 2816
    --ffn-hidden-size 2112
    --vocab-size 262144

    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 8
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

    --num-experts 128
    --moe-layer-freq "[1]*30"
    --moe-ffn-hidden-size 704
    --moe-shared-expert-intermediate-size 2112
    --moe-router-topk 8
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 0
    --moe-token-drop-policy probs
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
