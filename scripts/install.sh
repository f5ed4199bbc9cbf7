#!/usr/bin/env bash
# Make .venv with the pinned packages of requirements/, or bring it up to date.  Nothing happens when it is.
#
#   PYTHON=python3.12 scripts/install.sh        which Python makes the environment (3.11 or 3.12)
#   SLIME_TORCH_INDEX=URL scripts/install.sh    one more package index to look for torch in, for CPU builds: the
#                                               default build of torch on Linux carries gigabytes of CUDA libraries
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
STAMP="${VENV}/.installed"

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

fingerprint() { cat requirements/*.txt scripts/install.sh | sha256sum | cut -d' ' -f1; }

# Bytes that this machine has received over its network interfaces (other programs' traffic counts too).
received_bytes() { awk -F'[: ]+' '/:/ && $2 != "lo" { sum += $3 } END { printf "%d", sum }' <(sed 's/^ */ /' /proc/net/dev); }

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

install_torch() {
    "${VENV}/bin/python" -m pip install --quiet --disable-pip-version-check \
        ${SLIME_TORCH_INDEX:+--extra-index-url "${SLIME_TORCH_INDEX}"} -r requirements/torch.txt
}

install_torchvision() {
    "${VENV}/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target "${VENV}/vision" \
        ${SLIME_TORCH_INDEX:+--extra-index-url "${SLIME_TORCH_INDEX}"} -r requirements/vision.txt
}

# uv does not read pip's configuration: hand it the index that pip was told to use.
install_packages() {
    local index
    index=$("${VENV}/bin/python" -m pip config get global.index-url 2>/dev/null || true)
    index="${PIP_INDEX_URL:-${index}}"
    if [[ -n "${index}" && -z "${UV_DEFAULT_INDEX:-}" ]]; then
        export UV_DEFAULT_INDEX="${index}"
    fi
    "${VENV}/bin/uv" pip install --python "${VENV}/bin/python" --no-deps -r requirements/cpu.lock.txt
}

main() {
    if [[ -f "${STAMP}" && "$(cat "${STAMP}")" == "$(fingerprint)" ]]; then
        echo "install: ${VENV} is up to date"
        return
    fi
    local start=${SECONDS} received python
    received=$(received_bytes)
    if ! "${VENV}/bin/python" -c '' 2>/dev/null; then
        python=$(find_python)
        echo "install: making ${VENV} with $("${python}" --version)"
        "${python}" -m venv "${VENV}"
    fi
    rm -f "${STAMP}"
    step "torch" install_torch
    step "torchvision" install_torchvision
    step "all other packages" install_packages
    fingerprint >"${STAMP}"
    echo "install: done in $((SECONDS - start)) s, $(($(received_bytes) - received)) bytes received"
}

main "$@"
