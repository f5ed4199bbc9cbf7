#!/usr/bin/env bash
# Fully asynchronous GRPO on two CPU cores: scripts/run-tiny-cpu.sh with the flags that differ, and train_async.py.
#
#   examples/fully_async/run-tiny-fully-async.sh [FLAG...]
#
# TINY_DIR (runs/tiny): output of `make demo`.  The result is in SAVE_DIR (TINY_DIR/fully-async).
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/fully-async}"

# LOOP=async: train_async.py, engine and trainer with a (logical) GPU each, the rollout function and --max-staleness 2.
LOOP=async scripts/run-tiny-cpu.sh \
    --num-rollout 20 \
    --use-tis \
    --tis-clip 2.0 \
    "$@"
