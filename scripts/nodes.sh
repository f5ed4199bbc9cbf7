# A Ray cluster over several machines, for recipes with more than one node.  Source it behind lib.sh, then:
#
#   start_nodes 8 8                 8 nodes of 8 GPUs each; returns when all of them have joined
#
# MASTER_ADDR    address of this machine, the head, as the others reach it (default: its first address)
# HOSTFILE       a list of the nodes, address first on each line (an MPI hostfile will do); ssh must reach them without
#                a password.  Without it, join the other nodes by hand with the command that is printed.
# SSH_USER       for HOSTFILE (root)
# RAY_PORT, RAY_DASHBOARD_PORT    6379, 8265
# NODES_TIMEOUT_S                 how long to wait for all nodes (900)
#
# What is started here, on any node, ends with this script; nothing else is touched.  SLIME_SCRIPT_EXTERNAL_RAY=1 uses
# the cluster that is running.

# join_command NODE_ADDRESS NUM_GPUS: what makes a node join.
join_command() {
    echo "ray start --address=${MASTER_ADDR}:${RAY_PORT} --num-gpus $2 --node-ip-address $1 --disable-usage-stats"
}

start_nodes() {
    local num_nodes="$1" num_gpus="$2" start=${SECONDS} state
    if [[ -n "${SLIME_SCRIPT_EXTERNAL_RAY:-}" || -n "${SLIME_RAY_STARTED:-}" ]]; then
        start_ray "${num_gpus}"
        return
    fi
    export MASTER_ADDR="${MASTER_ADDR:-$(hostname -I | awk '{print $1}')}"
    export RAY_PORT="${RAY_PORT:-6379}" RAY_DASHBOARD_PORT="${RAY_DASHBOARD_PORT:-8265}"
    export no_proxy="${MASTER_ADDR},${no_proxy}" NO_PROXY="${MASTER_ADDR},${no_proxy}"
    export RAY_API_SERVER_ADDRESS="http://127.0.0.1:${RAY_DASHBOARD_PORT}"
    if [[ -z "${RAY_AUTH_TOKEN:-}" ]]; then
        unset RAY_AUTH_MODE # nodes that are joined by hand have no token; set RAY_AUTH_TOKEN on all to demand one
    fi
    _RAY_DIR="$(mktemp -d "${TMPDIR:-/tmp}/slime-ray-XXXXXX")"
    echo "ray: starting the head at ${MASTER_ADDR}:${RAY_PORT} (dashboard ${RAY_API_SERVER_ADDRESS}, logs ${_RAY_DIR})"
    # One process group: the head, and an ssh to each worker whose end (-tt) ends the node that it started.
    setsid bash -c "$(declare -f _run_nodes join_command); _run_nodes ${num_gpus}" >"${_RAY_DIR}/ray-start.log" 2>&1 &
    _RAY_PID=$!
    disown "${_RAY_PID}"
    setsid bash -c 'while kill -0 "$1" 2>/dev/null; do sleep 1; done
        [[ ! -s "$3/job" ]] || timeout 15 ray job stop --no-wait "$(cat "$3/job")"
        sleep 2; kill -TERM -- "-$2"; sleep 5; kill -KILL -- "-$2"' \
        watcher "$$" "${_RAY_PID}" "${_RAY_DIR}" >/dev/null 2>&1 &
    _WATCHER_PID=$!
    disown "${_WATCHER_PID}"
    if [[ -z "${HOSTFILE:-}" ]] && ((num_nodes > 1)); then
        echo "ray: HOSTFILE is not set; on each of the other $((num_nodes - 1)) nodes, run"
        echo "    $(join_command "<its address>" "${num_gpus}")"
    fi
    until state="$(_joined "$((num_nodes * num_gpus))")"; do
        if ! kill -0 "${_RAY_PID}" 2>/dev/null; then
            echo "ray: the head ended; the end of ${_RAY_DIR}/ray-start.log:" >&2
            tail -n 10 "${_RAY_DIR}/ray-start.log" >&2
            return 1
        fi
        if ((SECONDS - start > ${NODES_TIMEOUT_S:-900})); then
            echo "ray: after ${NODES_TIMEOUT_S:-900} s (NODES_TIMEOUT_S) there are ${state:-no nodes}; expected" \
                "${num_nodes} nodes of ${num_gpus} GPUs. The log ${_RAY_DIR}/ray-start.log says what ssh and Ray said." >&2
            return 1
        fi
        sleep 2
    done
    export SLIME_RAY_STARTED=1
    echo "ray: ${state} after $((SECONDS - start)) s"
}

# Runs in a process group of its own: the head, and the nodes of HOSTFILE.
_run_nodes() {
    local num_gpus="$1" address
    ray start --head --block --disable-usage-stats --node-ip-address "${MASTER_ADDR}" --port "${RAY_PORT}" \
        --num-gpus "${num_gpus}" --dashboard-host 0.0.0.0 --dashboard-port "${RAY_DASHBOARD_PORT}" &
    local head=$!
    if [[ -n "${HOSTFILE:-}" ]]; then
        for address in $(awk 'NF && $1 !~ /^#/ {print $1}' "${HOSTFILE}"); do
            [[ "${address}" == "${MASTER_ADDR}" ]] && continue
            echo "starting a node on ${address}"
            # The head needs some seconds; a node that comes too early tries again.
            (
                for attempt in 1 2 3 4 5; do
                    ssh -tt -o BatchMode=yes -o ConnectTimeout=20 "${SSH_USER:-root}@${address}" \
                        "cd '${REPO_DIR}' 2>/dev/null; PATH='${PATH}':\$PATH $(join_command "${address}" "${num_gpus}") --block" \
                        </dev/null && break
                    echo "node ${address}: attempt ${attempt} ended with $?"
                    sleep 5
                done
            ) &
        done
    fi
    wait "${head}"
}

# _joined NUM_GPUS: whether the cluster has that many; says what it has.
_joined() {
    RAY_ADDRESS="${MASTER_ADDR}:${RAY_PORT}" timeout 60 python3 - "$1" 2>/dev/null <<'PY'
import sys
import ray

ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
nodes = [node for node in ray.nodes() if node["Alive"]]
gpus = int(sum(node["Resources"].get("GPU", 0) for node in nodes))
print(f"{len(nodes)} nodes with {gpus} GPUs")
sys.exit(gpus < int(sys.argv[1]))
PY
}
