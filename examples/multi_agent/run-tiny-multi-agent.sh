#!/usr/bin/env bash
# Solvers and a judge, all trained, on two CPU cores: scripts/run-tiny-cpu.sh with the flags that differ.
#
#   examples/multi_agent/run-tiny-multi-agent.sh [FLAG...]
#
# TINY_DIR (runs/tiny): output of `make demo`.  The result is in SAVE_DIR (TINY_DIR/multi-agent).
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/multi-agent}"

start_ray 1
examples/tiny_tools/warm-start.sh

# 16 prompts x 4 executions x (3 solvers + 1 judge) = 256 samples; an optimizer step counts executions, 64 of them.
scripts/run-tiny-cpu.sh \
    --ref-load "${TINY_DIR}/tools/sft" \
    --prompt-data "${TINY_DIR}/tools/sums.jsonl" \
    --eval-config "${TINY_DIR}/tools/sums_eval.yaml" \
    --custom-generate-function-path examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents \
    --custom-reward-post-process-path examples.multi_agent.rollout_with_multi_agents.normalize_by_role \
    --custom-config-path examples/multi_agent/multi_agent.yaml \
    --rollout-batch-size 16 \
    --n-samples-per-prompt 4 \
    --global-batch-size 64 \
    --num-rollout 10 \
    "$@"
