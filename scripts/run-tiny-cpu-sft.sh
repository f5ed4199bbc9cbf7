#!/usr/bin/env bash
# The warm start of the tiny arithmetic job, on two CPU cores: supervised fine-tuning through the same train loop, with
# no engine.  The rows are learned in file order: clean worked sums first, a weak teacher last.  The learning rate is
# constant until the weak teacher begins and falls to zero from there.
#
#   scripts/run-tiny-cpu-sft.sh [FLAG...]       more flags for train_async.py; a later flag overrides an earlier one
#
# TINY_DIR (runs/tiny): what scripts/demo.sh made, task/ and torch_dist/.  The result is in TINY_DIR/sft.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "${REPO_DIR}/scripts/models/tiny-arithmetic.sh"

TINY_DIR="${TINY_DIR:-runs/tiny}"
SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/sft}"
need_file "${TINY_DIR}/task/data/sft.jsonl" "Run make demo first, or name its folder in TINY_DIR."
ROWS_PER_STEP=64
WEAK_STEPS=40
NUM_STEPS=$(($(wc -l <"${TINY_DIR}/task/data/sft.jsonl") / ROWS_PER_STEP))

CKPT_ARGS=(
    --hf-checkpoint "${TINY_DIR}/task/hf"
    --ref-load "${TINY_DIR}/torch_dist"
    --load "${SAVE_DIR}"
    --save "${SAVE_DIR}"
    --save-interval 1000 # the last step is always saved
    --save-hf "${SAVE_DIR}/hf"
)

SFT_ARGS=(
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout
    --prompt-data "${TINY_DIR}/task/data/sft.jsonl"
    --input-key messages
    --num-rollout "${NUM_STEPS}"
    --rollout-batch-size "${ROWS_PER_STEP}"
    --global-batch-size "${ROWS_PER_STEP}"
    --loss-type sft_loss
    --calculate-per-token-loss
    --disable-compute-advantages-and-returns
    --debug-train-only
)

PERF_ARGS=(
    --use-dynamic-batch-size
    --max-tokens-per-gpu 4096
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 3e-3
    --min-lr 0
    --lr-warmup-iters 20
    --lr-decay-style WSD
    --lr-wsd-decay-style linear
    --lr-wsd-decay-iters "${WEAK_STEPS}"
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
    --clip-grad 1.0
)

MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
)

start_ray 1

submit_job train_async.py \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node 1 \
    "${MODEL_ARGS[@]}" \
    "${CKPT_ARGS[@]}" \
    "${SFT_ARGS[@]}" \
    "${PERF_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" \
    "${MISC_ARGS[@]}" \
    "$@"
