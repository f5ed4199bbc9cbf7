#!/usr/bin/env bash
# Calls of a Python function, trained on two CPU cores: scripts/run-tiny-cpu.sh with the flags that differ.
#
#   examples/run-tiny-turns.sh [FLAG...]
#
# The warm start teaches the calls; the tiny template does not describe functions.
# TINY_DIR (runs/tiny): output of `make demo`.  The result is in SAVE_DIR (TINY_DIR/turns).
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/turns}"

start_ray 1
WARM_START=agents examples/tiny_tools/warm-start.sh
# The questions of examples/strands, where the agent itself makes messages of them.
sed 's/apply_chat_template: false/apply_chat_template: true/' "${TINY_DIR}/agents/calls_eval.yaml" \
    >"${TINY_DIR}/agents/turns_eval.yaml"

scripts/run-tiny-cpu.sh \
    --ref-load "${TINY_DIR}/agents/sft" \
    --prompt-data "${TINY_DIR}/agents/calls.jsonl" \
    --eval-config "${TINY_DIR}/agents/turns_eval.yaml" \
    --rollout-tools examples.multi_turn.multiply \
    --apply-chat-template-kwargs '{"tools": null}' \
    --custom-rm-path examples.multi_turn.reward \
    --rollout-max-turns 4 \
    --rollout-max-response-len 128 \
    --rollout-batch-size 16 \
    --global-batch-size 128 \
    --num-rollout 10 \
    --log-multi-turn \
    "$@"
