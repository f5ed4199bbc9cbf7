# DeepSeek-V3 and R1 671B-A37B; MODEL_ARGS_NUM_LAYERS shortens it
NUM_LAYERS="${MODEL_ARGS_NUM_LAYERS:-61}"
MODEL_ARGS=(
    --num-layers "${NUM_LAYERS}"
    --hidden-size 7168
    --ffn-hidden-size 18432
    --vocab-size 129280

    --multi-latent-attention
    --num-attention-heads 128
    --kv-channels 128
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --qk-layernorm
    --attention-softmax-in-fp32

    --position-embedding-type rope
    --rotary-base 10000
    --rotary-scaling-factor 40
    --mscale 1.0
    --mscale-all-dim 1.0
    --no-rope-fusion

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --untie-embeddings-and-output-weights

    --num-experts 256
    --moe-layer-freq "[0]*3+[1]*$((NUM_LAYERS - 3))"
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-router-topk 8
    --moe-router-score-function sigmoid
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0
    --moe-router-load-balancing-type seq_aux_loss
    --moe-router-num-groups 8
    --moe-router-group-topk 4
    --moe-router-topk-scaling-factor 2.5
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 0
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
