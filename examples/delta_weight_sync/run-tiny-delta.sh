#!/usr/bin/env bash
# Weight pushes as changed bytes over a disk, on two CPU cores: scripts/run-tiny-cpu.sh with the flags that differ.
#
#   examples/delta_weight_sync/run-tiny-delta.sh [FLAG...]
#
# TINY_DIR (runs/tiny): output of `make demo`.  The result is in SAVE_DIR (TINY_DIR/delta), the versions in
# SAVE_DIR/versions, the engine's copy of the model in SAVE_DIR/engine-copy.
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/delta}"
mkdir -p "${SAVE_DIR}"
FOLDER="$(realpath "${SAVE_DIR}")"

# Engine and trainer have a GPU each: an engine that shares the trainer's reads its memory, which no delta can beat.
# The last flag reads every weight back from the engine after each push; leave it out of real runs.
LOOP=apart scripts/run-tiny-cpu.sh \
    --num-rollout 10 \
    --update-weight-transport disk \
    --update-weight-mode delta \
    --update-weight-delta-encoding xor \
    --update-weight-disk-dir "${FOLDER}/versions" \
    --update-weight-disk-keep-files \
    --update-weight-local-checkpoint-dir "${FOLDER}/engine-copy" \
    --custom-update-weight-post-write-path examples.delta_weight_sync.post_write.announce \
    --check-weight-update-equal \
    "$@"
