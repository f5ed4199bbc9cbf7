# GLM-4.7-Flash 30B-A3B: multi-latent attention and experts
MODEL_ARGS=(
    --make-vocab-size-divisible-by 64
    --num-layers 47
    --hidden-size 2048
    --ffn-hidden-size 10240
    --vocab-size 154880

    --multi-latent-attention
    --num-attention-heads 20
    --kv-channels 192
    --q-lora-rank 768
    --kv-lora-rank 512
    --qk-head-dim 192
    --qk-pos-emb-head-dim 64
    --v-head-dim 256
    --qk-layernorm
    --add-qkv-bias

    --position-embedding-type rope
    --no-position-embedding
    --rotary-base 1000000
    --no-rope-fusion

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --untie-embeddings-and-output-weights

    --num-experts 64
    --moe-layer-freq "[0]*1+[1]*46"
    --moe-ffn-hidden-size 1536
    --moe-shared-expert-intermediate-size 1536
    --moe-router-topk 4
    --moe-router-score-function sigmoid
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0
    --moe-router-load-balancing-type seq_aux_loss
    --moe-router-topk-scaling-factor 1.8
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 0
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
