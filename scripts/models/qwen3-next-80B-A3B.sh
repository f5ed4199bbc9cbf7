# Qwen3-Next 80B-A3B: gated delta net and gated attention, with a shared expert
MODEL_ARGS=(
    --spec slime_plugins.models.qwen3_next get_qwen3_next_spec
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 5120
    --vocab-size 151936

    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 2
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

    --num-experts 512
    --moe-layer-freq "[1]*48"
    --moe-ffn-hidden-size 512
    --moe-shared-expert-intermediate-size 512
    --moe-shared-expert-gate
    --moe-router-topk 10
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 0
    --moe-token-drop-policy probs
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
