#!/usr/bin/env bash
# As scripts/run-kimi-k2-Thinking.sh, with engines in packed int4 and quantization-aware training:
# the trainer rounds the same weights in its forward passes.
#
#   scripts/low_precision/run-kimi-k2-Thinking-int4.sh [FLAG...]
#
# FLAG: more flags for the job; of a flag given twice the last counts.
#
# Variables are those of scripts/run-kimi-k2-Thinking.sh.  BASE_DIR holds Kimi-K2-Thinking:
#   it is published so.
# Not run on GPUs yet: an engine proves at its start that it can take pushes of packed integers (docs/quantization.md).
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"

exec bash "${SCRIPT_DIR}/../run-kimi-k2-Thinking.sh" \
    --hf-checkpoint "${BASE_DIR:?see the head of the script}/Kimi-K2-Thinking" \
    --int4-qat \
    --int4-qat-group-size 32 \
    "$@"
