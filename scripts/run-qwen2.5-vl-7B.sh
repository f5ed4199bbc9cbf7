#!/usr/bin/env bash
# GRPO on geometry questions with pictures, Qwen2.5-VL-7B on one node of 8 GPUs, shared by training and generation.
#
#   scripts/run-qwen2.5-vl-7B.sh [FLAG...]      more flags for the job; a later flag overrides an earlier one
#
# BASE_DIR (/root): has Qwen2.5-VL-7B-Instruct, Qwen2.5-VL-7B-Instruct_torch_dist and geo3k/train.parquet with the
# columns problem, answer and images.
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/lib.sh"
source "${SCRIPT_DIR}/models/qwen2.5-vl-7B.sh"

BASE_DIR="${BASE_DIR:-/root}"

CKPT_ARGS=(
    # the weights that SGLang starts with, and the tokenizer
    --hf-checkpoint "${BASE_DIR}/Qwen2.5-VL-7B-Instruct"
    # the reference model
    --ref-load "${BASE_DIR}/Qwen2.5-VL-7B-Instruct_torch_dist"
    # the actor's checkpoints; while there are none, it starts from --ref-load
    --load "${BASE_DIR}/Qwen2.5-VL-7B-Instruct_slime/"
    --save "${BASE_DIR}/Qwen2.5-VL-7B-Instruct_slime/"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "${BASE_DIR}/geo3k/train.parquet"
    --input-key problem
    --label-key answer
    --multimodal-keys '{"image": "images"}'
    --apply-chat-template
    --rollout-shuffle
    --rm-type math
    --num-rollout 300
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 4096
    --rollout-temperature 0.8

    --global-batch-size 256
    --balance-data
)

PERF_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --expert-model-parallel-size 1
    --expert-tensor-parallel-size 1

    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
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
    # --wandb-group qwen2.5-vl-7B
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
    --sglang-cuda-graph-bs-decode 1 2 4 8 $(seq 16 8 256)
)

MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

start_ray 8

JOB_ENV="$(job_env CUDA_DEVICE_MAX_CONNECTIONS=1 "NCCL_NVLS_ENABLE=$(has_nvlink)")"
submit_job train.py \
    --actor-num-nodes 1 \
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
