#!/usr/bin/env bash
# GRPO on math with DeepSeek-V3 on 16 nodes of 8 GPUs: the recipe of scripts/run-deepseek-r1.sh with other folders.
#
#   scripts/run-deepseek-v3.sh [FLAG...]      more flags for the job; a later flag overrides an earlier one
#
# BASE_DIR: a folder shared by all nodes, with DeepSeek-V3 (FP8, as published), DeepSeek-V3_torch_dist,
# dapo-math-17k and aime-2024.  Everything else as in scripts/run-deepseek-r1.sh.
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
NAME="${BASE_DIR:-}/DeepSeek-V3"

exec "${SCRIPT_DIR}/run-deepseek-r1.sh" \
    --hf-checkpoint "${NAME}" \
    --ref-load "${NAME}_torch_dist" \
    --load "${NAME}_slime/" \
    --save "${NAME}_slime/" \
    "$@"
