#!/usr/bin/env bash
# GRPO of Qwen3-VL on geometry questions with images, on one machine whose GPUs training and generation share.
#
#   examples/geo3k_vlm/run_geo3k_vlm.sh [FLAG...]      more flags for the job; a later flag overrides an earlier one
#
# BASE_DIR (/root): has MODEL (Qwen3-VL-2B-Instruct) and geo3k/train.parquet with the columns problem, answer and images.
# NUM_GPUS: by default all.
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"

BASE_DIR="${BASE_DIR:-/root}"
MODEL="${MODEL:-Qwen3-VL-2B-Instruct}"
SAVE_DIR="${SAVE_DIR:-${BASE_DIR}/${MODEL}_geo3k}"
NUM_GPUS="${NUM_GPUS:-$(nvidia-smi -L 2>/dev/null | wc -l)}"
if ((NUM_GPUS < 1)); then
    echo "run_geo3k_vlm.sh: found no GPU; set NUM_GPUS if there are some" >&2
    exit 2
fi

start_ray "${NUM_GPUS}"
submit_job train.py \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node "${NUM_GPUS}" \
    --colocate \
    --hf-checkpoint "${BASE_DIR}/${MODEL}" \
    --ref-load "${BASE_DIR}/${MODEL}" \
    --load "${SAVE_DIR}" \
    --save "${SAVE_DIR}" \
    --save-interval 20 \
    --prompt-data "${BASE_DIR}/geo3k/train.parquet" \
    --input-key problem \
    --label-key answer \
    --multimodal-keys '{"image": "images"}' \
    --apply-chat-template \
    --rollout-shuffle \
    --rm-type math \
    --num-rollout 300 \
    --rollout-batch-size 32 \
    --n-samples-per-prompt 8 \
    --rollout-max-response-len 4096 \
    --rollout-temperature 0.8 \
    --global-batch-size 256 \
    --balance-data \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 8192 \
    --advantage-estimator grpo \
    --eps-clip 0.2 \
    --eps-clip-high 0.28 \
    --optimizer adam \
    --lr 1e-6 \
    --lr-decay-style constant \
    --weight-decay 0.1 \
    --adam-beta1 0.9 \
    --adam-beta2 0.98 \
    --rollout-num-gpus-per-engine 1 \
    --sglang-mem-fraction-static 0.6 \
    --bf16 \
    --attention-dropout 0.0 \
    --hidden-dropout 0.0 \
    --accumulate-allreduce-grads-in-fp32 \
    --attention-softmax-in-fp32 \
    "$@"
