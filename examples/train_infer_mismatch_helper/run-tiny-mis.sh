#!/usr/bin/env bash
# Corrections for the mismatch of trainer and engine, on two CPU cores: scripts/run-tiny-cpu.sh with other flags.
#
#   examples/train_infer_mismatch_helper/run-tiny-mis.sh [FLAG...]
#
# On this stack both sides agree to 3e-7 when they hold the same weights, so the run is fully asynchronous: the engine's
# weights are older than the trainer's, and there is something to correct.
#
# TINY_DIR (runs/tiny): output of `make demo`.  The result is in SAVE_DIR (TINY_DIR/mis).  MIS_CONFIG: the settings.
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"

export TINY_DIR="${TINY_DIR:-runs/tiny}"
export SAVE_DIR="${SAVE_DIR:-${TINY_DIR}/mis}"
MIS_CONFIG="${MIS_CONFIG:-examples/train_infer_mismatch_helper/mis-async.yaml}"

LOOP=async scripts/run-tiny-cpu.sh \
    --num-rollout 20 \
    --use-tis \
    --custom-config-path "${MIS_CONFIG}" \
    --custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp \
    "$@"
