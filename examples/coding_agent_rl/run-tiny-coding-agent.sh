#!/usr/bin/env bash
# A coding agent in sandboxes, trained on two CPU cores: scripts/run-tiny-cpu.sh with the flags that differ.
#
#   examples/coding_agent_rl/run-tiny-coding-agent.sh [FLAG...]
#
# TINY_DIR (runs/tiny): output of `make demo`.  The result is in SAVE_DIR (TINY_DIR/coding-agent).
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/coding-agent}"

start_ray 1
WARM_START=agents examples/tiny_tools/warm-start.sh

scripts/run-tiny-cpu.sh \
    --ref-load "${TINY_DIR}/agents/sft" \
    --prompt-data "${TINY_DIR}/agents/code.jsonl" \
    --eval-config "${TINY_DIR}/agents/code_eval.yaml" \
    --custom-generate-function-path examples.coding_agent_rl.generate.generate \
    --custom-config-path examples/coding_agent_rl/tiny.yaml \
    --rollout-max-response-len 96 \
    --rollout-max-context-len 256 \
    --rollout-batch-size 8 \
    --global-batch-size 64 \
    --num-rollout 10 \
    "$@"
