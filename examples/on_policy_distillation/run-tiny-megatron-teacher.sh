#!/usr/bin/env bash
# On-policy distillation on two CPU cores, the teacher inside the trainer: scripts/run-tiny-cpu.sh with other flags.
#
#   examples/on_policy_distillation/run-tiny-megatron-teacher.sh [FLAG...]
#
# TINY_DIR (runs/tiny): output of `make demo`; the student is its warm start, the teacher (TEACHER_DIR) its last model.
# The result is in SAVE_DIR (TINY_DIR/opd-megatron).
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/opd-megatron}"
TEACHER_DIR="${TEACHER_DIR:-${TINY_DIR}/grpo-seed1}"

# The task's reward is replaced by zeros on purpose, so that the student learns from the teacher only.  It still grades
# the evaluation, by --eval-config.
scripts/run-tiny-cpu.sh \
    --use-opd \
    --opd-type megatron \
    --opd-teacher-load "${TEACHER_DIR}" \
    --opd-kl-coef 1.0 \
    --custom-reward-post-process-path examples.on_policy_distillation.rewards.zeros \
    --n-samples-per-prompt 4 \
    --global-batch-size 128 \
    --num-rollout 10 \
    "$@"
