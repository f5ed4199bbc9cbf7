#!/usr/bin/env bash
# A task of reasoning-gym, trained on two CPU cores: scripts/run-tiny-cpu.sh with the flags that differ.
#
#   examples/run-tiny-gym.sh [FLAG...]
#
# What the tiny model reaches is not measured: in four rollouts of 128 samples the reward stayed at .02.
# Needs pip install 'slime[gym]'.  TINY_DIR (runs/tiny): output of `make demo`.  The result is in SAVE_DIR (TINY_DIR/gym).
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/gym}"
TASK="gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"

mkdir -p "${SAVE_DIR}"
cat >"${SAVE_DIR}/eval.yaml" <<YAML
eval:
  datasets:
    - {name: chain_sum, path: "${TASK}&size=128&seed=1000000", input_key: input, label_key: label, apply_chat_template: true}
YAML

PROMPTS=own scripts/run-tiny-cpu.sh \
    --prompt-data "${TASK}&size=2048&seed=1" \
    --input-key input \
    --label-key label \
    --apply-chat-template \
    --eval-config "${SAVE_DIR}/eval.yaml" \
    --num-rollout 20 \
    "$@"
