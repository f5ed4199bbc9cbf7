#!/usr/bin/env bash
# Supervised fine-tuning of Qwen3-4B-Base on the GPUs of one machine, through the same train loop; no engine runs.
#
#   scripts/run-qwen3-4B-base-sft.sh [FLAG...]      more flags for the job; a later flag overrides an earlier one
#
# BASE_DIR (/root): has Qwen3-4B-Base, Qwen3-4B-Base_torch_dist and openhermes2_5.parquet.  NUM_GPUS: by default all.
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/lib.sh"
source "${SCRIPT_DIR}/models/qwen3-4B.sh"

BASE_DIR="${BASE_DIR:-/root}"

NUM_GPUS="${NUM_GPUS:-$(nvidia-smi -L 2>/dev/null | wc -l)}"
if ((NUM_GPUS < 1)); then
    echo "run-qwen3-4B-base-sft.sh: found ${NUM_GPUS} GPUs and needs at least 1; set NUM_GPUS if there are more" >&2
    exit 2
fi

CKPT_ARGS=(
    # the weights that SGLang starts with, and the tokenizer
    --hf-checkpoint "${BASE_DIR}/Qwen3-4B-Base"
    # the reference model
    --ref-load "${BASE_DIR}/Qwen3-4B-Base_torch_dist"
    # the actor's checkpoints; while there are none, it starts from --ref-load
    --load "${BASE_DIR}/Qwen3-4B-Base_slime/"
    --save "${BASE_DIR}/Qwen3-4B-Base_slime/"
    --save-interval 1000
)

SFT_ARGS=(
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout
    --prompt-data "${BASE_DIR}/openhermes2_5.parquet"
    --input-key messages
    --rollout-shuffle
    --num-epoch 3
    --rollout-batch-size 128
    --global-batch-size 128

    --loss-type sft_loss
    --calculate-per-token-loss
    --disable-compute-advantages-and-returns
    --debug-train-only
)

PERF_ARGS=(
    --tensor-model-parallel-size 1
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

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-5
    --lr-decay-style cosine
    --min-lr 1e-6
    --lr-warmup-fraction 0.1
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
)

WANDB_ARGS=(
    # --use-wandb
    # --wandb-project slime
    # --wandb-group qwen3-4B-base-sft
)

MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

start_ray "${NUM_GPUS}"

JOB_ENV="$(job_env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True CUDA_DEVICE_MAX_CONNECTIONS=1 "NCCL_NVLS_ENABLE=$(has_nvlink)")"
submit_job train_async.py \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node "${NUM_GPUS}" \
    "${MODEL_ARGS[@]}" \
    "${CKPT_ARGS[@]}" \
    "${SFT_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" \
    "${PERF_ARGS[@]}" \
    "${WANDB_ARGS[@]}" \
    "${MISC_ARGS[@]}" \
    "$@"
