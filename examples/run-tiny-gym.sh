#!/usr/bin/env bash
# A task of reasoning-gym, trained on two CPU cores: scripts/run-tiny-cpu.sh with the flags that differ.
#
#   examples/run-tiny-gym.sh [FLAG...]
#
# Needs pip install -e '.[gym]'.  TINY_DIR (runs/tiny): output of `make demo`.  The warm start is in TINY_DIR/gym, the
# result in SAVE_DIR (TINY_DIR/chain_sum).
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/chain_sum}"
TASK="gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"

start_ray 1
WARM_START=gym examples/tiny_tools/warm-start.sh
mkdir -p "${SAVE_DIR}"
cat >"${SAVE_DIR}/eval.yaml" <<YAML
eval:
  datasets:
    - {name: chain_sum, path: "${TASK}&size=256&seed=1000000", input_key: input, label_key: label, apply_chat_template: true}
YAML

PROMPTS=own scripts/run-tiny-cpu.sh \
    --ref-load "${TINY_DIR}/gym/sft" \
    --prompt-data "${TASK}&size=2048&seed=1" \
    --input-key input \
    --label-key label \
    --apply-chat-template \
    --eval-config "${SAVE_DIR}/eval.yaml" \
    --rollout-max-response-len 48 \
    --rollout-batch-size 16 \
    --global-batch-size 128 \
    --num-rollout 10 \
    "$@"
