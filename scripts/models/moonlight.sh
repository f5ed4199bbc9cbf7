# Moonlight 16B-A3B: DeepSeek-V3's layout without a query bottleneck
MODEL_ARGS=(
    --num-layers 27
    --hidden-size 2048
    --ffn-hidden-size 11264
    --vocab-size 163840

    --multi-latent-attention
    --num-attention-heads 16
    --kv-channels 128
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --qk-layernorm
    --attention-softmax-in-fp32

    --position-embedding-type rope
    --rotary-base 50000
    --rope-type rope
    --no-rope-fusion

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --untie-embeddings-and-output-weights

    --num-experts 64
    --moe-layer-freq "[0]*1+[1]*26"
    --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 2816
    --moe-router-topk 6
    --moe-router-score-function sigmoid
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0
    --moe-router-load-balancing-type seq_aux_loss
    --moe-router-num-groups 1
    --moe-router-group-topk 1
    --moe-router-topk-scaling-factor 2.446
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 0
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
