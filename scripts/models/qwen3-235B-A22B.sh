# Qwen3 235B-A22B
MODEL_ARGS=(
    --num-layers 94
    --hidden-size 4096
    --ffn-hidden-size 12288
    --vocab-size 151936

    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --qk-layernorm

    --position-embedding-type rope
    --rotary-percent 1.0
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --untie-embeddings-and-output-weights

    --num-experts 128
    --moe-layer-freq "[1]*94"
    --moe-ffn-hidden-size 1536
    --moe-router-topk 8
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 0
    --moe-token-drop-policy probs
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
