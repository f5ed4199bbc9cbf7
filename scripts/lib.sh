# Functions for recipes: start a private Ray cluster and submit a job to it.  Source this file, then:
#
#   start_ray 1                     start a cluster with that many GPUs (logical ones on a machine without GPUs)
#   ray job submit ... -- python3 train.py ...    or submit_job train.py ..., which also handles Ctrl-C and failures
#
# The cluster has its own ports, token and temporary folder, so it does not interfere with other clusters.  When the
# script ends, for whatever reason, everything that it started is stopped, and nothing else.
#
# SLIME_SCRIPT_EXTERNAL_RAY=1 uses a running cluster (dashboard at RAY_API_SERVER_ADDRESS, by default
# http://127.0.0.1:8265) instead of starting one.

set -euo pipefail

REPO_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "${REPO_DIR}"
if [[ -x "${REPO_DIR}/.venv/bin/python3" ]]; then
    export PATH="${REPO_DIR}/.venv/bin:${PATH}"
fi

# need_gpu_environment: exit if .venv is for CPUs and the job for GPUs.  (A .venv without .kind is from before there
# was a choice, and for CPUs.)
need_gpu_environment() {
    local asks="${DEVICE:+DEVICE=}${DEVICE:-this machine}"
    if [[ -d .venv && "$(cat .venv/.kind 2>/dev/null || echo cpu)" == cpu && "$(scripts/device.sh)" == gpu ]]; then
        echo "ray: .venv is the cpu environment, and ${asks} asks for the gpu one." >&2
        echo "ray: rm -r .venv && DEVICE=gpu make install; or set DEVICE=cpu for a job on the CPU" >&2
        exit 2
    fi
}

export PYTHONUNBUFFERED=1
# Many images forbid bytecode: each process of a job would then compile thousands of files.
unset PYTHONDONTWRITEBYTECODE
# Each process would print a page of deprecation warnings of torch, Megatron and SGLang.
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore::FutureWarning,ignore::UserWarning,ignore::DeprecationWarning}"
# The second folder lets processes without CUDA import SGLang; with CUDA it has no effect.
export PYTHONPATH="${REPO_DIR}:${REPO_DIR}/slime/backends/sglang_utils/cpu_shim${PYTHONPATH:+:${PYTHONPATH}}"
# Local traffic bypasses proxies.
export no_proxy="127.0.0.1,localhost,::1,$(hostname -I 2>/dev/null | tr ' ' ',')${no_proxy:-}"
export NO_PROXY="${no_proxy}"
# Ray's servers refuse clients without the token, but for a running cluster that has none.
if [[ -z "${SLIME_SCRIPT_EXTERNAL_RAY:-}" ]]; then
    export RAY_AUTH_MODE=token
elif [[ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" || -e "${HOME:-/}/.ray/auth_token" ]]; then
    export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
fi
# A missing model or data folder is an error, not a download from the Hugging Face hub.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

# need_file FILE HINT: exit with the hint when an input file of the script is missing.
need_file() {
    if [[ ! -e "$1" ]]; then
        echo "$1 does not exist. $2" >&2
        exit 2
    fi
}

_RAY_PID=""
_RAY_DIR=""
_WATCHER_PID=""
_JOB_ID=""

# free_ports N: print N different free TCP ports, one per line.  They lie below those that the kernel gives to connections:
# one of these may take a port between this look and Ray's start.
free_ports() {
    python3 - "$1" <<'PY'
import random, socket, sys

sockets = []
for port in random.sample(range(11000, 20000), 9000):
    if len(sockets) == int(sys.argv[1]):
        break
    one = socket.socket()
    try:
        one.bind(("", port))
    except OSError:
        one.close()
        continue
    sockets.append(one)
    print(port)
PY
}

# Succeed when the dashboard accepts jobs.
_dashboard_answers() {
    python3 - <<'PY'
import os, sys, urllib.request

request = urllib.request.Request(
    os.environ["RAY_API_SERVER_ADDRESS"] + "/api/jobs/",
    headers={"Authorization": "Bearer " + open(os.environ.get("RAY_AUTH_TOKEN_PATH", os.devnull)).read().strip()},
)
try:
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5)
except OSError:
    sys.exit(1)
PY
}

# start_ray NUM_GPUS [FLAG...]: start the cluster and wait until it accepts jobs.  A cluster that the calling script has
# started (scripts/demo.sh runs several jobs in one) is used, and not stopped here.
start_ray() {
    local attempt
    if [[ -n "${SLIME_SCRIPT_EXTERNAL_RAY:-}" || -n "${SLIME_RAY_STARTED:-}" ]]; then
        export RAY_API_SERVER_ADDRESS="${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}"
        return
    fi
    need_gpu_environment
    # Keep 127.0.0.1: without this, Ray replaces it by the address of the outgoing interface.
    export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0
    # Ray gives up on a node that has not registered after 30 s; on a busy machine it may take longer.
    for attempt in 1 2 3; do
        if _start_ray_once "$@"; then
            export SLIME_RAY_STARTED=1
            return
        fi
        echo "ray: attempt ${attempt} failed; logs are kept in ${_RAY_DIR}" >&2
        _show_cause >&2
        _stop_ray
    done
    echo "ray: no cluster could be started" >&2
    return 1
}

# _show_cause: what Ray's logs say of a failed start.  The end of ray-start.log has the consequences; the cause is an error
# further up in it, or in the log of the process that ended first.
_show_cause() {
    local file lines found="" logs="${_RAY_DIR}/ray/session_latest/logs"
    local error='^[EF][0-9]{4} |^.{0,40} [EFC] |\b(ERROR|CRITICAL|FATAL)\b|^ *[A-Za-z_.]*(Error|Exception)\b|Check failed|exited unexpectedly'
    local cause='[Nn]o space left|[Aa]ddress already in use|[Pp]ermission denied|[Tt]oo many open files|exit code'
    for file in "${_RAY_DIR}/ray-start.log" "${logs}"/{gcs_server,raylet,dashboard,dashboard_agent}.{err,out,log}; do
        [[ -s "${file}" ]] || continue
        lines="$(grep -aE "${error}|${cause}" "${file}" | awk '!seen[$0]++' | cut -c 1-600 | tail -n 5 || true)"
        [[ -n "${lines}" ]] || continue
        found=1
        echo "${file}:"
        sed 's/^/    /' <<<"${lines}"
    done
    if [[ -z "${found}" && -f "${_RAY_DIR}/ray-start.log" ]]; then
        echo "${_RAY_DIR}/ray-start.log:"
        tail -n 20 "${_RAY_DIR}/ray-start.log" | sed 's/^/    /'
    fi
}

# make_token: put Ray's token, RAY_AUTH_TOKEN where it is set, into a file that only this user reads: an environment is seen
# by plug-ins and by what they start.  Ray's default one, in the home folder, is shared with other clusters.
make_token() {
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="${_RAY_DIR}/token"
    _RAY_TOKEN="${RAY_AUTH_TOKEN:-${_RAY_TOKEN:-$(python3 -c 'import secrets; print(secrets.token_hex(32))')}}"
    (umask 077; echo "${_RAY_TOKEN}" >"${_RAY_DIR}/token")
    unset RAY_AUTH_TOKEN
}

_start_ray_once() {
    local num_gpus="$1" ports start=${SECONDS}
    shift
    _RAY_DIR="$(python3 -m slime.utils.files)"
    make_token
    mapfile -t ports < <(free_ports 6)
    export RAY_API_SERVER_ADDRESS="http://127.0.0.1:${ports[1]}"
    export RAY_ADDRESS="127.0.0.1:${ports[0]}"
    echo "ray: starting a cluster with ${num_gpus} GPU(s) (dashboard ${RAY_API_SERVER_ADDRESS}, logs ${_RAY_DIR})"
    # Workers take any free port: with a fixed range, two clusters on one machine would try the same ports.
    # A bundle of the job has one GPU and one CPU; engines, managers and the job itself need CPUs too.
    setsid ray start --head --block --disable-usage-stats --temp-dir "${_RAY_DIR}/ray" --node-ip-address 127.0.0.1 \
        --num-gpus "${num_gpus}" --num-cpus "$((2 * num_gpus + 8))" \
        --port "${ports[0]}" --min-worker-port 0 --max-worker-port 0 \
        --dashboard-host 127.0.0.1 --dashboard-port "${ports[1]}" \
        --dashboard-agent-listen-port "${ports[2]}" --dashboard-agent-grpc-port "${ports[3]}" \
        --ray-client-server-port "${ports[4]}" --metrics-export-port "${ports[5]}" \
        "$@" >"${_RAY_DIR}/ray-start.log" 2>&1 &
    _RAY_PID=$!
    disown "${_RAY_PID}"
    _watch_ray
    until grep -q "Ray runtime started" "${_RAY_DIR}/ray-start.log" && _dashboard_answers; do
        if ! kill -0 "${_RAY_PID}" 2>/dev/null || ((SECONDS - start > 120)); then
            return 1
        fi
        sleep 0.5
    done
    echo "ray: ready after $((SECONDS - start)) s"
}

# When this script is killed and no trap runs, a watcher ends the job and the cluster: a restarted command must not find
# its predecessor still writing to the same folders.
_watch_ray() {
    setsid bash -c 'while kill -0 "$1" 2>/dev/null; do sleep 1; done
        [[ ! -s "$3/job" ]] || timeout 15 ray job stop --no-wait "$(cat "$3/job")"
        sleep 2; kill -TERM -- "-$2"; sleep 5; kill -KILL -- "-$2"' \
        watcher "$$" "${_RAY_PID}" "${_RAY_DIR}" >/dev/null 2>&1 &
    _WATCHER_PID=$!
    disown "${_WATCHER_PID}"
}

# Stop our cluster: the process group that setsid made, with the id of its first process; workers end with their raylet.
_stop_ray() {
    local deadline=$((SECONDS + 4))
    kill -KILL -- "-${_WATCHER_PID}" 2>/dev/null || true
    kill -TERM -- "-${_RAY_PID}" 2>/dev/null || true
    while kill -0 -- "-${_RAY_PID}" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2; done
    kill -KILL -- "-${_RAY_PID}" 2>/dev/null || true
    rm -f "${_RAY_DIR}/token"
    _RAY_PID=""
}

# has_nvlink: print 1 when the GPUs of this machine are linked directly, else 0.  A value of NCCL_NVLS_ENABLE takes
# precedence: the machine's administrator may have turned multicast off.
has_nvlink() {
    local links
    if [[ -n "${NCCL_NVLS_ENABLE:-}" ]]; then
        echo "${NCCL_NVLS_ENABLE}"
        return
    fi
    links="$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l || true)"
    echo "$((links > 0 ? 1 : 0))"
}

# job_env NAME=VALUE...: print these variables as a JSON object, for JOB_ENV.
job_env() {
    python3 -c 'import json, sys; print(json.dumps(dict(word.split("=", 1) for word in sys.argv[1:])))' "$@"
}

# need NAME...: exit with a message when one of these variables is not set.
need() {
    local name
    for name in "$@"; do
        if [[ -z "${!name:-}" ]]; then
            echo "$(basename "$0"): ${name} is not set; see the comment at the top of the script" >&2
            exit 2
        fi
    done
}

# submit_job SCRIPT ARGUMENT...: run `python3 SCRIPT ARGUMENT...` as a Ray job, wait for it, and return its exit code.
# The job gets the environment variables of the JSON object JOB_ENV, and those that JOB_EXTRA_ENV names.
submit_job() {
    local runtime_env status=0
    runtime_env="$(python3 -c '
import json, os, sys
variables = {name: os.environ[name] for name in sys.argv[2:] if name in os.environ}
print(json.dumps({"env_vars": variables | json.loads(sys.argv[1])}))
' "${JOB_ENV:-"{}"}" PYTHONPATH PYTHONUNBUFFERED PYTHONWARNINGS PATH no_proxy NO_PROXY HF_HUB_OFFLINE OMP_NUM_THREADS ${JOB_EXTRA_ENV:-})"
    _JOB_ID="slime-$(date +%H%M%S)-$$-${RANDOM}"
    [[ -z "${_RAY_DIR}" ]] || echo "${_JOB_ID}" >"${_RAY_DIR}/job"
    # In the background, so that a signal reaches this shell at once and its trap can stop the job.
    ray job submit --submission-id "${_JOB_ID}" --runtime-env-json "${runtime_env}" --log-style record \
        -- python3 "$@" &
    wait "$!" || status=$?
    _JOB_ID=""
    return "${status}"
}

# _clean_up [STATUS]: stop our running job and our cluster, and exit.
_clean_up() {
    local status="${1:-$?}"
    trap - EXIT INT TERM
    if [[ -n "${_JOB_ID}" ]]; then
        echo "stopping job ${_JOB_ID}" >&2
        timeout 20 ray job stop "${_JOB_ID}" >/dev/null 2>&1 || true
    fi
    if [[ -n "${_RAY_PID}" ]]; then
        _stop_ray
        if ((status == 0)); then
            rm -rf "$(readlink -f "${_RAY_DIR}/ray")" "${_RAY_DIR}" 2>/dev/null || true
        else
            echo "ray: stopped; logs are kept in ${_RAY_DIR}" >&2
        fi
    fi
    exit "${status}"
}
trap _clean_up EXIT
trap '_clean_up 130' INT
trap '_clean_up 143' TERM
