# MiniMax-M2 230B-A10B: norms over all query heads and all key heads, experts in every layer, none shared.
# Its config.json has MTP modules, which are omitted here as in SGLang.
MODEL_ARGS=(
    --spec slime_plugins.models.minimax_m2 get_minimax_m2_spec
    --num-layers 62
    --hidden-size 3072
    --ffn-hidden-size 1536
    --vocab-size 200064

    --num-attention-heads 48
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --qk-layernorm

    --position-embedding-type rope
    --rotary-percent 0.5
    --rotary-base 5000000

    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --untie-embeddings-and-output-weights

    --num-experts 256
    --moe-layer-freq "[1]*62"
    --moe-ffn-hidden-size 1536
    --moe-router-topk 8
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0
    --moe-router-load-balancing-type seq_aux_loss
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 0
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
