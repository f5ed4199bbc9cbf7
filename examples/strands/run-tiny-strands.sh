#!/usr/bin/env bash
# A Strands agent with a tool, trained on two CPU cores: scripts/run-tiny-cpu.sh with the flags that differ.
#
#   examples/strands/run-tiny-strands.sh [FLAG...]
#
# Needs pip install 'strands-agents[openai]' (the extra `strands`).  TINY_DIR (runs/tiny): output of `make demo`.  The
# result is in SAVE_DIR (TINY_DIR/strands).
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/strands}"

start_ray 1
WARM_START=agents examples/tiny_tools/warm-start.sh

scripts/run-tiny-cpu.sh \
    --ref-load "${TINY_DIR}/agents/sft" \
    --prompt-data "${TINY_DIR}/agents/calls.jsonl" \
    --eval-config "${TINY_DIR}/agents/calls_eval.yaml" \
    --custom-generate-function-path examples.strands.generate_with_strands.generate \
    --rollout-max-response-len 128 \
    --rollout-max-context-len 256 \
    --rollout-batch-size 16 \
    --global-batch-size 128 \
    --num-rollout 10 \
    "$@"
