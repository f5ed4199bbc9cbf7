# gpt-oss 120b: sinks, sliding windows in every other layer, YaRN, biases; 128 experts with a clamped gate
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 2880
    --ffn-hidden-size 2880
    --vocab-size 201088

    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --kv-channels 64
    --add-qkv-bias
    --softmax-type learnable
    --window-size 127,0
    --window-attn-skip-freq 2

    --position-embedding-type yarn
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-150000}"
    --rotary-scaling-factor 32
    --original-max-position-embeddings 4096
    --beta-fast 32
    --beta-slow 1
    --no-yarn-truncate

    --quick-geglu
    --glu-linear-offset 1.0
    --activation-func-clamp-value 7.0
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --untie-embeddings-and-output-weights

    --num-experts 128
    --moe-ffn-hidden-size 2880
    --moe-router-topk 4
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 0
    --moe-token-drop-policy probs
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --expert-tensor-parallel-size 1
)
