# DeepSeek-V4-Flash 284B-A13B: sliding window and compressed entries, four residual streams, experts by table or scores
MODEL_ARGS=(
    --spec slime_plugins.models.deepseek_v4 get_deepseek_v4_spec
    --num-layers 43
    --hidden-size 4096
    --ffn-hidden-size 2048
    --vocab-size 129280

    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 1
    --kv-channels 512
    --q-lora-rank 1024
    --softmax-type learnable
    --window-size 127,0
    --position-embedding-type none
    --rotary-base 10000
    --rotary-percent 0.125

    --swiglu
    --activation-func-clamp-value 10
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --untie-embeddings-and-output-weights

    --num-experts 256
    --moe-layer-freq "[1]*43"
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-router-topk 6
    --moe-router-topk-scaling-factor 1.5
    --moe-router-score-function sigmoid # the layers use sqrt(softplus) instead
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0
    --moe-router-load-balancing-type seq_aux_loss
    --moe-router-pre-softmax
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 0
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
