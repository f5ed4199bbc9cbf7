#!/usr/bin/env bash
# Counting shapes in images, on two CPU cores: a random Qwen3-VL model, its warm start, and GRPO of text and tower.
#
#   examples/vision_shapes/run-vision-shapes.sh [FLAG...]          more flags for GRPO
#   WRONG=1 examples/vision_shapes/run-vision-shapes.sh            the control: each question has another one's image
#   DEVICE=gpu examples/vision_shapes/run-vision-shapes.sh         on one GPU, the warm start too
#
# TINY_DIR (runs/tiny): all files go to its folder shapes/; the run to SAVE_DIR (there, grpo-seed1 or grpo-wrong-seed1).
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}/shapes"
export SEED="${SEED:-1}"
NAME="grpo${WRONG:+-wrong}"
RUN_DIR="${SAVE_DIR:-${TINY_DIR}/${NAME}-seed${SEED}}"
VISION_ARGS=(
    --multimodal-keys '{"image": "images"}'
    --train-vision-tower
)
LENGTH_ARGS=(--num-rollout 30 --rollout-batch-size 16 --global-batch-size 128)
if [[ "${DEVICE:-cpu}" == gpu ]]; then
    # A larger batch and a decaying learning rate: with the CPU settings, accuracy fell again after ten rollouts.
    LENGTH_ARGS=(--num-rollout 60 --rollout-batch-size 32 --global-batch-size 256 --lr-decay-style cosine --min-lr 5e-5)
fi

python3 examples/vision_shapes/make_task.py --output "${TINY_DIR}/task"
start_ray 1
if [[ ! -f "${TINY_DIR}/sft/done" ]]; then
    SAVE_DIR="${TINY_DIR}/sft" scripts/run-tiny-cpu-sft.sh \
        --ref-load "${TINY_DIR}/task/hf" --vocab-size 132 "${VISION_ARGS[@]}"
    touch "${TINY_DIR}/sft/done"
fi

SAVE_DIR="${RUN_DIR}" "scripts/run-tiny-${DEVICE:-cpu}.sh" \
    --prompt-data "${TINY_DIR}/task/data/grpo${WRONG:+_wrong}.jsonl" \
    --eval-config "${TINY_DIR}/task/eval${WRONG:+_wrong}.yaml" \
    --eval-interval 10 \
    "${LENGTH_ARGS[@]}" \
    "${VISION_ARGS[@]}" \
    "$@"
