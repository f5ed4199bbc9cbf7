# Mixtral 8x7B: experts in every layer, none shared
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --vocab-size 32000

    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128

    --position-embedding-type rope
    --rotary-percent 1.0
    --rotary-base 1000000

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --untie-embeddings-and-output-weights

    --num-experts 8
    --moe-layer-freq "[1]*32"
    --moe-ffn-hidden-size 14336
    --moe-router-topk 2
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 0
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
