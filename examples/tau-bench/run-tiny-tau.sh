#!/usr/bin/env bash
# A user, a database and an agent, trained on two CPU cores: scripts/run-tiny-cpu.sh with the flags that differ.
#
#   examples/tau-bench/run-tiny-tau.sh [FLAG...]
#
# TINY_DIR (runs/tiny): output of `make demo`.  The result is in SAVE_DIR (TINY_DIR/tau).
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/tau}"
# The plug-ins are imported by the names below, so their folder must be on Python's path.
export PYTHONPATH="${REPO_DIR}/examples/tau-bench:${PYTHONPATH}"

start_ray 1
WARM_START=agents examples/tiny_tools/warm-start.sh

scripts/run-tiny-cpu.sh \
    --ref-load "${TINY_DIR}/agents/sft" \
    --prompt-data "${TINY_DIR}/agents/orders.jsonl" \
    --eval-config "${TINY_DIR}/agents/orders_eval.yaml" \
    --custom-generate-function-path generate_with_tau.generate \
    --custom-config-path examples/tau-bench/orders.yaml \
    --rollout-max-response-len 256 \
    --rollout-batch-size 16 \
    --global-batch-size 128 \
    --num-rollout 10 \
    --log-multi-turn \
    "$@"
