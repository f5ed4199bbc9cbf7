#!/usr/bin/env bash
# As scripts/run-kimi-k2-Thinking.sh, with the text model of Kimi-K2.5, which has the same layers.
#
#   scripts/run-kimi-k2.5.sh [FLAG...]      more flags for the job; a later flag overrides an earlier one
#
# Variables are those of scripts/run-kimi-k2-Thinking.sh.  BASE_DIR holds Kimi-K2.5 (int4, as published) and
# Kimi-K2.5_torch_dist, converted from what tools/convert_k2_thinking_int4_to_bf16.py makes.
# Engines read the vision tower from Kimi-K2.5; prompts are text.  Not run on GPUs yet.
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
HF_DIR="${BASE_DIR:?see the head of the script}/Kimi-K2.5"

exec bash "${SCRIPT_DIR}/run-kimi-k2-Thinking.sh" \
    --hf-checkpoint "${HF_DIR}" \
    --ref-load "${HF_DIR}_torch_dist" \
    --load "${HF_DIR}_slime/" \
    --save "${HF_DIR}_slime/" \
    "$@"
