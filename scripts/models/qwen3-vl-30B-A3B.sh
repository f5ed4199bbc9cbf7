# Qwen3-VL 30B-A3B: the language model; the vision tower follows from config.json
MODEL_ARGS=(
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --vocab-size 151936

    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --qk-layernorm

    --position-embedding-type rope
    --rotary-percent 1.0
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-5000000}"

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --untie-embeddings-and-output-weights

    --num-experts 128
    --moe-layer-freq "[1]*48"
    --moe-ffn-hidden-size 768
    --moe-router-topk 8
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 0
    --moe-token-drop-policy probs
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
