#!/usr/bin/env bash
# As scripts/run-qwen3-30B-A3B.sh, with training and generation in FP8 with the same block scales.
#
#   scripts/low_precision/run-qwen3-30B-A3B-fp8.sh [FLAG...]
#
# FLAG: more flags for the job; of a flag given twice the last counts.
#
# Variables are those of scripts/run-qwen3-30B-A3B.sh.  BASE_DIR holds Qwen3-30B-A3B-FP8 as well:
#   tools/convert_hf_to_fp8.py --strategy block --block-size 128 128 \
#       --model-dir Qwen3-30B-A3B --save-dir Qwen3-30B-A3B-FP8
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"

exec bash "${SCRIPT_DIR}/../run-qwen3-30B-A3B.sh" \
    --hf-checkpoint "${BASE_DIR:-/root}/Qwen3-30B-A3B-FP8" \
    --fp8-format e4m3 \
    --fp8-recipe blockwise \
    "$@"
