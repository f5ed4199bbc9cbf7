#!/usr/bin/env bash
# The questions of examples/geo3k_vlm in several turns, with a tool that checks answers.  Same variables and flags.
SAVE_DIR="${SAVE_DIR:-${BASE_DIR:-/root}/${MODEL:-Qwen3-VL-2B-Instruct}_geo3k_turns}" \
    exec "$(dirname "${BASH_SOURCE[0]}")/../geo3k_vlm/run_geo3k_vlm.sh" \
    --custom-generate-function-path examples.geo3k_vlm_multi_turn.rollout.generate \
    --custom-config-path examples/geo3k_vlm_multi_turn/geo3k_vlm_multi_turn_config.yaml \
    --log-multi-turn \
    "$@"
