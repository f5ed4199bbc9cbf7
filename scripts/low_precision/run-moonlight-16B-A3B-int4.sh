#!/usr/bin/env bash
# As scripts/run-moonlight-16B-A3B.sh, with engines in packed int4 and quantization-aware training:
# the trainer rounds the same weights in its forward passes.
#
#   scripts/low_precision/run-moonlight-16B-A3B-int4.sh [FLAG...]
#
# FLAG: more flags for the job; of a flag given twice the last counts.
#
# Variables are those of scripts/run-moonlight-16B-A3B.sh.  BASE_DIR holds Moonlight-16B-A3B-Instruct-INT4 as well:
#   tools/convert_hf_to_int4_direct.py --group-size 128 --ignore-rules re:.*self_attn re:.*layers.0.mlp \
#       --model-dir Moonlight-16B-A3B-Instruct --save-dir Moonlight-16B-A3B-Instruct-INT4
# Not run on GPUs yet: an engine proves at its start that it can take pushes of packed integers (docs/quantization.md).
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"

exec bash "${SCRIPT_DIR}/../run-moonlight-16B-A3B.sh" \
    --hf-checkpoint "${BASE_DIR:-/root}/Moonlight-16B-A3B-Instruct-INT4" \
    --int4-qat \
    --int4-qat-group-size 128 \
    "$@"
