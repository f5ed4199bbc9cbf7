#!/usr/bin/env bash
# Evaluation on several tasks beside GRPO, on two CPU cores: scripts/run-tiny-cpu.sh with the flags that differ.
#
#   examples/eval_multi_task/run-tiny-eval.sh [FLAG...]
#
# TINY_DIR (runs/tiny): output of `make demo`.  The result is in SAVE_DIR (TINY_DIR/multi-task-run).
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/multi-task-run}"

python3 examples/eval_multi_task/make_data.py --output "${TINY_DIR}/multi-task"

scripts/run-tiny-cpu.sh \
    --num-rollout 10 \
    --eval-interval 5 \
    --eval-config "${TINY_DIR}/multi-task/multi_task.yaml" \
    --log-passrate \
    "$@"
