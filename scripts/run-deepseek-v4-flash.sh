#!/usr/bin/env bash
# GRPO on math with DeepSeek-V4-Flash (284B-A13B) on 8 nodes of 8 GPUs, in bf16.
#
#   scripts/run-deepseek-v4-flash.sh [FLAG...]      more flags for the job; a later flag overrides an earlier one
#
# BASE_DIR: a folder shared by all nodes, with DeepSeek-V4-Flash-bf16 (of tools/fp8_cast_bf16.py from the published
# weights), the same _torch_dist, and dapo-math-17k.
# MASTER_ADDR, HOSTFILE: see scripts/nodes.sh.  SOCKET_IFNAME (eth0): the network interface of all nodes.
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/lib.sh"
source "${SCRIPT_DIR}/nodes.sh"
source "${SCRIPT_DIR}/models/deepseek-v4-flash.sh"

need BASE_DIR MASTER_ADDR
SOCKET_IFNAME="${SOCKET_IFNAME:-eth0}"
HF_DIR="${BASE_DIR}/DeepSeek-V4-Flash-bf16"

NUM_NODES="${ACTOR_NUM_NODES:-8}"

CKPT_ARGS=(
    # the weights that SGLang starts with, the tables of experts, and the tokenizer
    --hf-checkpoint "${HF_DIR}"
    # the reference model
    --ref-load "${HF_DIR}_torch_dist"
    # the actor's checkpoints; while there are none, it starts from --ref-load
    --load "${HF_DIR}_slime/"
    --save "${HF_DIR}_slime/"
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
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 16384
    --rollout-temperature 1

    --global-batch-size 256
    --balance-data
)

PERF_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --context-parallel-size 2
    --expert-model-parallel-size 16
    --expert-tensor-parallel-size 1
    # 43 layers do not divide by 4
    --decoder-last-pipeline-num-layers 10

    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 10240
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --kl-coef 0.00
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
    # --wandb-group deepseek-v4-flash
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 16
    --sglang-mem-fraction-static 0.7
    --sglang-enable-dp-attention
    --sglang-dp-size 16
    --sglang-ep-size 16
)

MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

start_nodes "${NUM_NODES}" 8

# SGLANG_OPT_FP8_WO_A_GEMM=0: SGLang would have the output projection of a bf16 folder in FP8 and refuse it.
JOB_ENV="$(job_env \
    CUDA_DEVICE_MAX_CONNECTIONS=1 \
    "GLOO_SOCKET_IFNAME=${SOCKET_IFNAME}" \
    "TP_SOCKET_IFNAME=${SOCKET_IFNAME}" \
    "NCCL_SOCKET_IFNAME=${SOCKET_IFNAME}" \
    NCCL_CUMEM_ENABLE=0 \
    NCCL_NVLS_ENABLE=0 \
    SGLANG_OPT_FP8_WO_A_GEMM=0)"
submit_job train.py \
    --actor-num-nodes "${NUM_NODES}" \
    --actor-num-gpus-per-node 8 \
    --colocate \
    "${MODEL_ARGS[@]}" \
    "${CKPT_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" \
    "${PERF_ARGS[@]}" \
    "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" \
    "${WANDB_ARGS[@]}" \
    "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" \
    "$@"
