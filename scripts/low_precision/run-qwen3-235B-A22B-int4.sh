#!/usr/bin/env bash
# As scripts/run-qwen3-235B-A22B.sh, with engines in packed int4 and quantization-aware training:
# the trainer rounds the same weights in its forward passes.
#
#   scripts/low_precision/run-qwen3-235B-A22B-int4.sh [FLAG...]
#
# FLAG: more flags for the job; of a flag given twice the last counts.
#
# Variables are those of scripts/run-qwen3-235B-A22B.sh.  BASE_DIR holds Qwen3-235B-A22B-INT4 as well:
#   tools/convert_hf_to_int4_direct.py --group-size 128 --ignore-rules re:.*self_attn \
#       --model-dir Qwen3-235B-A22B --save-dir Qwen3-235B-A22B-INT4
# Not run on GPUs yet: an engine proves at its start that it can take pushes of packed integers (docs/quantization.md).
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"

exec bash "${SCRIPT_DIR}/../run-qwen3-235B-A22B.sh" \
    --hf-checkpoint "${BASE_DIR:?see the head of the script}/Qwen3-235B-A22B-INT4" \
    --int4-qat \
    --int4-qat-group-size 128 \
    "$@"
