# GLM-4.5 355B-A32B
MODEL_ARGS=(
    --num-layers 92
    --hidden-size 5120
    --ffn-hidden-size 12288
    --vocab-size 151552

    --num-attention-heads 96
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --add-qkv-bias
    --qk-layernorm

    --position-embedding-type rope
    --rotary-percent 0.5
    --rotary-base 1000000

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --untie-embeddings-and-output-weights

    --num-experts 160
    --moe-layer-freq "[0]*3+[1]*89"
    --moe-ffn-hidden-size 1536
    --moe-shared-expert-intermediate-size 1536
    --moe-router-topk 8
    --moe-router-score-function sigmoid
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0
    --moe-router-load-balancing-type seq_aux_loss
    --moe-router-topk-scaling-factor 2.5
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 0
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
