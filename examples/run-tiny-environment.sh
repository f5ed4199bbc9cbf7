#!/usr/bin/env bash
# A text game, trained on two CPU cores: scripts/run-tiny-cpu.sh with the flags that differ.
#
#   examples/run-tiny-environment.sh [FLAG...]
#
# TINY_DIR (runs/tiny): output of `make demo`.  The result is in SAVE_DIR (TINY_DIR/game).
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/game}"

# A row is a game: all samples of a group look for the same number.
mkdir -p "${SAVE_DIR}"
ROW='{"prompt": "play", "metadata": {"seed": %d, "highest": 3}}\n'
printf "${ROW}" {1..512} >"${SAVE_DIR}/games.jsonl"
printf "${ROW}" {1001..1128} >"${SAVE_DIR}/games_eval.jsonl"
cat >"${SAVE_DIR}/eval.yaml" <<YAML
eval:
  datasets:
    - {name: games, path: "${SAVE_DIR}/games_eval.jsonl", input_key: prompt}
YAML

PROMPTS=own scripts/run-tiny-cpu.sh \
    --prompt-data "${SAVE_DIR}/games.jsonl" \
    --input-key prompt \
    --eval-config "${SAVE_DIR}/eval.yaml" \
    --rollout-environment examples.multi_turn.GuessNumber \
    --rollout-max-turns 4 \
    --rollout-max-response-len 128 \
    --rollout-batch-size 16 \
    --global-batch-size 128 \
    --num-rollout 10 \
    --log-multi-turn \
    "$@"
