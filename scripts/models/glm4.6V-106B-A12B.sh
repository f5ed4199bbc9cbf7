# GLM-4.6V 106B-A12B: the language model; the vision tower follows from config.json
MODEL_ARGS=(
    --num-layers 46
    --hidden-size 4096
    --ffn-hidden-size 10944
    --vocab-size 151552

    --num-attention-heads 96
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --add-qkv-bias

    --position-embedding-type rope
    --rotary-percent 0.5
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-500000}"

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --untie-embeddings-and-output-weights

    --num-experts 128
    --moe-layer-freq "[0]*1+[1]*45"
    --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 1408
    --moe-router-topk 8
    --moe-router-score-function sigmoid
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0
    --moe-router-load-balancing-type seq_aux_loss
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 0
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
