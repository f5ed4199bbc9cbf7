#!/usr/bin/env bash
# An environment of verifiers with a tool, trained on two CPU cores: scripts/run-tiny-cpu.sh with the flags that differ.
#
#   examples/run-tiny-verifiers.sh [FLAG...]
#
# Needs pip install -e '.[verifiers]'.  TINY_DIR (runs/tiny): output of `make demo`.  The result is in SAVE_DIR
# (TINY_DIR/verifiers).
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/verifiers}"

start_ray 1
WARM_START=agents examples/tiny_tools/warm-start.sh
cat >"${TINY_DIR}/agents/verifiers_eval.yaml" <<YAML
eval:
  datasets:
    - {name: products, path: "verifiers-eval:examples.tiny_products", input_key: input, temperature: 0.0}
YAML

scripts/run-tiny-cpu.sh \
    --ref-load "${TINY_DIR}/agents/sft" \
    --prompt-data "verifiers:examples.tiny_products" \
    --input-key input \
    --eval-config "${TINY_DIR}/agents/verifiers_eval.yaml" \
    --custom-rm-path examples.tiny_products.reward \
    --rollout-max-response-len 128 \
    --rollout-max-context-len 256 \
    --rollout-batch-size 16 \
    --global-batch-size 128 \
    --num-rollout 10 \
    --log-multi-turn \
    "$@"
