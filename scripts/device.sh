#!/usr/bin/env bash
# Print what this machine computes on: "gpu" if it has an NVIDIA GPU and the driver, else "cpu".  DEVICE=cpu or
# DEVICE=gpu takes precedence.  No Python is needed.
#
#   scripts/device.sh [ROOT]        ROOT: the folder that has proc and dev, for tests
set -euo pipefail

case "${DEVICE:-}" in
    cpu | gpu) echo "${DEVICE}" && exit ;;
    "") ;;
    *) echo "device: DEVICE is ${DEVICE}; it must be cpu or gpu, or unset to see what the machine has" >&2 && exit 2 ;;
esac
root="${1:-}"
if [[ "$(nvidia-smi -L 2>/dev/null)" == GPU* ]] ||
    compgen -G "${root}/proc/driver/nvidia/gpus/*" >/dev/null || compgen -G "${root}/dev/nvidia[0-9]*" >/dev/null; then
    echo gpu
else
    echo cpu
fi
