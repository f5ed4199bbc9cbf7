# GLM-5 744B-A40B: multi-latent attention, sparse attention
MODEL_ARGS=(
    --spec slime_plugins.models.glm5.glm5 get_glm5_spec
    --make-vocab-size-divisible-by 16
    --num-layers 78
    --hidden-size 6144
    --ffn-hidden-size 12288
    --vocab-size 154880

    --multi-latent-attention
    --num-attention-heads 64
    --kv-channels 192
    --q-lora-rank 2048
    --kv-lora-rank 512
    --qk-head-dim 192
    --qk-pos-emb-head-dim 64
    --v-head-dim 256
    --qk-layernorm

    --position-embedding-type rope
    --no-position-embedding
    --rotary-base 1000000

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --untie-embeddings-and-output-weights

    --num-experts 256
    --moe-layer-freq "[0]*3+[1]*75"
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
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

    --enable-experimental
    --allgather-cp
)
