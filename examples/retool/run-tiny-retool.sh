#!/usr/bin/env bash
# Tool use with a Python sandbox, trained on two CPU cores: scripts/run-tiny-cpu.sh with the flags that differ.
#
#   examples/retool/run-tiny-retool.sh [FLAG...]
#
# TINY_DIR (runs/tiny): output of `make demo`.  The result is in SAVE_DIR (TINY_DIR/retool).
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/retool}"

start_ray 1
examples/tiny_tools/warm-start.sh

scripts/run-tiny-cpu.sh \
    --ref-load "${TINY_DIR}/tools/sft" \
    --prompt-data "${TINY_DIR}/tools/python.jsonl" \
    --eval-config "${TINY_DIR}/tools/python_eval.yaml" \
    --custom-generate-function-path examples.retool.generate_with_retool.generate \
    --custom-rm-path examples.retool.generate_with_retool.reward_func \
    --custom-config-path examples/retool/retool.yaml \
    --rollout-max-response-len 160 \
    --num-rollout 10 \
    --log-multi-turn \
    "$@"
