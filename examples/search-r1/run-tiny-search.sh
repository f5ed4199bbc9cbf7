#!/usr/bin/env bash
# Search in several turns, trained on two CPU cores: the recipe of scripts/run-tiny-cpu.sh with the flags that differ.
#
#   examples/search-r1/run-tiny-search.sh [FLAG...]
#
# TINY_DIR (runs/tiny): output of `make demo`.  The result is in SAVE_DIR (TINY_DIR/search).
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/search}"
# The plug-ins are imported by the names below, so their folder must be on Python's path.
export PYTHONPATH="${REPO_DIR}/examples/search-r1:${PYTHONPATH}"

start_ray 1
examples/tiny_tools/warm-start.sh

mkdir -p "${SAVE_DIR}"
cat >"${SAVE_DIR}/search.yaml" <<YAML
search_corpus: $(realpath "${TINY_DIR}")/tools/facts.txt
search_max_turns: 4
search_topk: 1
YAML

scripts/run-tiny-cpu.sh \
    --ref-load "${TINY_DIR}/tools/sft" \
    --prompt-data "${TINY_DIR}/tools/search.jsonl" \
    --eval-config "${TINY_DIR}/tools/search_eval.yaml" \
    --custom-generate-function-path generate_with_search.generate \
    --custom-rm-path generate_with_search.reward_func \
    --custom-config-path "${SAVE_DIR}/search.yaml" \
    --rollout-max-response-len 192 \
    --num-rollout 10 \
    --log-multi-turn \
    "$@"
