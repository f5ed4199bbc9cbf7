#!/usr/bin/env bash
# GRPO on math with Kimi-K2-Thinking on 32 nodes of 8 GPUs: trained in bf16, served with 4-bit experts.
#
#   scripts/run-kimi-k2-Thinking.sh [FLAG...]      more flags for the job; a later flag overrides an earlier one
#
# BASE_DIR: a folder shared by all nodes, with Kimi-K2-Thinking (int4, as published), Kimi-K2-Thinking_torch_dist,
# dapo-math-17k and aime-2024.
# MASTER_ADDR, HOSTFILE: see scripts/nodes.sh.  SOCKET_IFNAME (eth0): the network interface of all nodes.
#
# Kimi-K2-Thinking_torch_dist is converted from what tools/convert_k2_thinking_int4_to_bf16.py makes.
# Not run on GPUs yet: an engine proves at its start that it can take pushes of packed integers (docs/quantization.md).
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/lib.sh"
source "${SCRIPT_DIR}/nodes.sh"
source "${SCRIPT_DIR}/models/kimi-k2-thinking.sh"

need BASE_DIR
SOCKET_IFNAME="${SOCKET_IFNAME:-eth0}"

NUM_NODES="${ACTOR_NUM_NODES:-32}"

CKPT_ARGS=(
    # the weights that SGLang starts with, and the tokenizer
    --hf-checkpoint "${BASE_DIR}/Kimi-K2-Thinking"
    --trust-remote-code
    # the reference model
    --ref-load "${BASE_DIR}/Kimi-K2-Thinking_torch_dist"
    # the actor's checkpoints; while there are none, it starts from --ref-load
    --load "${BASE_DIR}/Kimi-K2-Thinking_slime/"
    --save "${BASE_DIR}/Kimi-K2-Thinking_slime/"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "${BASE_DIR}/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 3000
    --rollout-batch-size 128
    --n-samples-per-prompt 8
    --rollout-max-response-len 32768
    --rollout-temperature 1

    --over-sampling-batch-size 256
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std

    --num-steps-per-rollout 4
    --balance-data
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data aime "${BASE_DIR}/aime-2024/aime-2024.jsonl"
    --n-samples-per-eval-prompt 8
    --eval-max-response-len 32768
    --eval-top-p 1
)

PERF_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 8
    --context-parallel-size 4
    --expert-model-parallel-size 32
    --expert-tensor-parallel-size 1
    # 61 layers do not divide by 8
    --decoder-last-pipeline-num-layers 5

    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 16384
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.00
    --kl-loss-type low_var_kl
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98

    # Adam on the host: its state needs no GPU memory.
    --optimizer-cpu-offload
    --overlap-cpu-optimizer-d2h-h2d
    --use-precision-aware-optimizer
)

WANDB_ARGS=(
    # --use-wandb
    # --wandb-project slime
    # --wandb-group kimi-k2-thinking
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 16
    --sglang-mem-fraction-static 0.7
    --sglang-tool-call-parser kimi_k2
    --sglang-reasoning-parser kimi_k2
)

MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash

    # DeepEP in the trainer
    --moe-enable-deepep
    --moe-token-dispatcher-type flex
)

start_nodes "${NUM_NODES}" 8

JOB_ENV="$(job_env \
    CUDA_DEVICE_MAX_CONNECTIONS=1 \
    "GLOO_SOCKET_IFNAME=${SOCKET_IFNAME}" \
    "TP_SOCKET_IFNAME=${SOCKET_IFNAME}" \
    "NCCL_SOCKET_IFNAME=${SOCKET_IFNAME}" \
    NCCL_CUMEM_ENABLE=0 \
    NCCL_NVLS_ENABLE=0 \
    NVTE_BWD_LAYERNORM_SM_MARGIN=20 \
    NCCL_IB_TC=160 \
    NCCL_PXN_DISABLE=0 \
    NCCL_IB_GID_INDEX=3 \
    NCCL_NET_GDR_LEVEL=4 \
    NCCL_IB_RETRY_CNT=7 \
    NCCL_IB_TIMEOUT=32 \
    NCCL_IB_QPS_PER_CONNECTION=8 \
    NCCL_P2P_LEVEL=NVL \
    NCCL_MIN_CTAS=4 \
    NVSHMEM_DISABLE_NCCL=1)"
submit_job train.py \
    --actor-num-nodes "${NUM_NODES}" \
    --actor-num-gpus-per-node 8 \
    --colocate \
    "${MODEL_ARGS[@]}" \
    "${CKPT_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" \
    "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" \
    "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" \
    "${WANDB_ARGS[@]}" \
    "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" \
    "$@"
