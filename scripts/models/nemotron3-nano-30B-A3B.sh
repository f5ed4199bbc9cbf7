# Nemotron 3 Nano 30B-A3B: one mixer per layer, Mamba-2 (M), experts (E) or attention without positions (*)
PATTERN="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
layers_of() { sed "s/[^$1]/0,/g; s/$1/1,/g; s/^/[/; s/,\$/]/" <<<"${PATTERN}"; }
MODEL_ARGS=(
    --spec slime_plugins.models.nemotron_h get_nemotron_h_spec
    --num-layers 52
    --hidden-size 2688
    --ffn-hidden-size 1856
    --vocab-size 131072

    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 2
    --kv-channels 128
    --position-embedding-type none

    --linear-attention-freq "$(layers_of M)"
    --linear-num-key-heads 8
    --linear-num-value-heads 64
    --linear-key-head-dim 128
    --linear-value-head-dim 64
    --linear-conv-kernel-dim 4

    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --untie-embeddings-and-output-weights

    --num-experts 128
    --moe-layer-freq "$(layers_of E)"
    --moe-ffn-hidden-size 1856
    --moe-shared-expert-intermediate-size 3712
    --moe-router-topk 6
    --moe-router-topk-scaling-factor 2.5
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0
    --moe-router-load-balancing-type seq_aux_loss
    --moe-router-pre-softmax
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 0
    --moe-token-drop-policy probs
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
