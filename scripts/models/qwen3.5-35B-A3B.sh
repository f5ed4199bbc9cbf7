# Qwen3.5 35B-A3B: gated delta net and gated attention, with a shared expert; Qwen3.6 35B-A3B too
MODEL_ARGS=(
    --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec
    --num-layers 40
    --hidden-size 2048
    --ffn-hidden-size 512
    --vocab-size 248320

    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 2
    --kv-channels 256
    --qk-layernorm
    --use-gated-attention
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

    --num-experts 256
    --moe-layer-freq "[1]*40"
    --moe-ffn-hidden-size 512
    --moe-shared-expert-intermediate-size 512
    --moe-shared-expert-gate
    --moe-router-topk 8
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 0
    --moe-token-drop-policy probs
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
