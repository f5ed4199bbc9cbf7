#!/usr/bin/env bash
# GRPO on math with gemma-4-26B-A4B-it (its text model) on one node of 8 GPUs, shared by training and generation.
#
#   scripts/run-gemma4-26B-A4B.sh [FLAG...]      more flags for the job; a later flag overrides an earlier one
#
# BASE_DIR (/root): has gemma-4-26B-A4B-it, gemma-4-26B-A4B-it_torch_dist, dapo-math-17k
# and aime-2024.
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/lib.sh"
source "${SCRIPT_DIR}/models/gemma4-26B-A4B.sh"

BASE_DIR="${BASE_DIR:-/root}"

CKPT_ARGS=(
    # the weights that SGLang starts with, and the tokenizer
    --hf-checkpoint "${BASE_DIR}/gemma-4-26B-A4B-it"
    # the reference model
    --ref-load "${BASE_DIR}/gemma-4-26B-A4B-it_torch_dist"
    # the actor's checkpoints; while there are none, it starts from --ref-load
    --load "${BASE_DIR}/gemma-4-26B-A4B-it_slime/"
    --save "${BASE_DIR}/gemma-4-26B-A4B-it_slime/"
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
    --rollout-max-response-len 8192
    --rollout-temperature 1

    --global-batch-size 256
    --balance-data
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data aime "${BASE_DIR}/aime-2024/aime-2024.jsonl"
    --n-samples-per-eval-prompt 16
    --eval-max-response-len 16384
    --eval-top-p 1
)

PERF_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1

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
    # --wandb-group gemma4-26B-A4B
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 4
    --sglang-mem-fraction-static 0.7
    --sglang-ep-size 4
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
    "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" \
    "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" \
    "${WANDB_ARGS[@]}" \
    "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" \
    "$@"
