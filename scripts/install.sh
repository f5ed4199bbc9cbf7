#!/usr/bin/env bash
# Make .venv with the pinned packages of requirements/, or bring it up to date.  Nothing happens when it is.  On a
# machine with an NVIDIA GPU it is the GPU environment, elsewhere the CPU one; .venv/.kind says which was made.
#
#   DEVICE=gpu scripts/install.sh               the GPU environment, whatever the machine has (cpu: the other one)
#   PYTHON=python3.12 scripts/install.sh        which Python makes the environment (3.11 or 3.12)
#   SLIME_TORCH_INDEX=URL scripts/install.sh    one more package index to look for torch in, for CPU builds: the
#                                               default build of torch on Linux carries gigabytes of CUDA libraries
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
STAMP="${VENV}/.installed"
# 5 GB of packages on their way to 12 GB.
GPU_GB=18

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3; do
        [[ -n "${candidate}" ]] || continue
        if "${candidate}" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
            echo "${candidate}"
            return
        fi
    done
    echo "install: Python 3.11 or 3.12 is needed; set PYTHON to one" >&2
    return 1
}

fingerprint() { cat requirements/*.txt scripts/install.sh pyproject.toml | sha256sum | cut -d' ' -f1; }

# Bytes that this machine has received over its network interfaces (other programs' traffic counts too).
received_bytes() { awk -F'[: ]+' '/:/ && $2 != "lo" { sum += $3 } END { printf "%.0f", sum }' <(sed 's/^ */ /' /proc/net/dev); }

# step TITLE COMMAND...: run it, then say how long it took, what came over the network, and how large .venv is.
step() {
    local title="$1" start received
    shift
    start=$(date +%s%N)
    received=$(received_bytes)
    echo "install: ${title} ..."
    "$@"
    awk -v title="${title}" -v ns="$(($(date +%s%N) - start))" -v got="$(($(received_bytes) - received))" \
        -v size="$(du -sm "${VENV}" | cut -f1)" \
        'BEGIN { printf "install: %s: %.1f s, %.1f MB received, %s is now %d MB\n", title, ns / 1e9, got / 1e6, "'${VENV}'", size }'
}

# pip_install WORD...: with pip, which honours its own configuration and SLIME_TORCH_INDEX.
pip_install() {
    "${VENV}/bin/python" -m pip install --quiet --disable-pip-version-check \
        ${SLIME_TORCH_INDEX:+--extra-index-url "${SLIME_TORCH_INDEX}"} "$@"
}

# The CUDA libraries of the GPU build are packages of the lock: uv brings them with all others.
install_gpu_torch() {
    local pins
    mapfile -t pins < <(grep -E '^torch(audio|vision)?==' requirements/gpu.lock.txt; grep '^uv==' requirements/torch.txt)
    pip_install --no-deps "${pins[@]}"
}

check_gpu_torch() {
    "${VENV}/bin/python" - <<'PY'
import sys

import torch

if torch.version.cuda is None:
    sys.exit(f"install: torch {torch.__version__} has no CUDA; unset SLIME_TORCH_INDEX, or name an index of CUDA builds")
PY
}

# uv does not read pip's configuration: hand it the index that pip was told to use.
install_packages() {
    local index
    index=$("${VENV}/bin/python" -m pip config get global.index-url 2>/dev/null || true)
    index="${PIP_INDEX_URL:-${index}}"
    if [[ -n "${index}" && -z "${UV_DEFAULT_INDEX:-}" ]]; then
        export UV_DEFAULT_INDEX="${index}"
    fi
    "${VENV}/bin/uv" pip install --python "${VENV}/bin/python" --no-deps -r "requirements/${1}.lock.txt"
}

# The command slime, and the entry point by which SGLang finds slime's hooks; the code stays in this checkout.
install_checkout() {
    "${VENV}/bin/uv" pip install --quiet --offline --python "${VENV}/bin/python" --no-deps --no-build-isolation -e .
}

# refuse_another_kind KIND: exit when .venv is there for another one.  (Before there were two, all were for CPUs.)
refuse_another_kind() {
    local made asks="${DEVICE:+DEVICE=}${DEVICE:-this machine}"
    [[ -d "${VENV}" ]] || return 0
    made="$(cat "${VENV}/.kind" 2>/dev/null || echo cpu)"
    if [[ "${made}" != "$1" ]]; then
        echo "install: ${VENV} is the ${made} environment, and ${asks} asks for the $1 one." >&2
        echo "install: to keep it, set DEVICE=${made}; to replace it: rm -r ${VENV} && DEVICE=$1 make install" >&2
        return 2
    fi
}

# Exit when the GPU environment does not fit on the disk.
need_room() {
    local free
    free=$(df -Pk . | awk 'NR == 2 { printf "%d", $4 / 1e6 }')
    if ((free < GPU_GB)); then
        echo "install: ${free} GB are free here, and making the GPU environment takes ${GPU_GB}" >&2
        return 1
    fi
}

main() {
    local kind start=${SECONDS} received python
    kind="$(scripts/device.sh)"
    refuse_another_kind "${kind}"
    if [[ -f "${STAMP}" && "$(cat "${STAMP}")" == "$(fingerprint)" ]]; then
        echo "install: ${VENV} is up to date"
        return
    fi
    received=$(received_bytes)
    if ! "${VENV}/bin/python" -c '' 2>/dev/null; then
        [[ "${kind}" != gpu ]] || need_room
        python=$(find_python)
        echo "install: making ${VENV}, the ${kind} environment, with $("${python}" --version)"
        "${python}" -m venv "${VENV}"
    fi
    rm -f "${STAMP}"
    echo "${kind}" >"${VENV}/.kind"
    if [[ "${kind}" == gpu ]]; then
        step "torch" install_gpu_torch
    else
        step "torch" pip_install -r requirements/torch.txt
        step "torchvision" pip_install --no-deps --upgrade --target "${VENV}/vision" -r requirements/vision.txt
    fi
    step "all other packages" install_packages "${kind}"
    [[ "${kind}" == gpu ]] || step "for tests alone" pip_install --no-deps --upgrade --target "${VENV}/extras" -r requirements/extras.txt
    step "the command slime" install_checkout
    [[ "${kind}" != gpu ]] || check_gpu_torch
    fingerprint >"${STAMP}"
    echo "install: done in $((SECONDS - start)) s, $(($(received_bytes) - received)) bytes received"
}

main "$@"
