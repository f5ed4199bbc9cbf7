# Start a Ray cluster on several machines, for recipes with more than one node.  Source this file after lib.sh, then:
#
#   start_nodes 8 8                 start 8 nodes of 8 GPUs each; returns when all of them have joined
#
# MASTER_ADDR    address of this machine, the head, as the others reach it (default: its first address)
# HOSTFILE       list of the nodes, with the address first on each line, as in an MPI hostfile; ssh must reach them
#                without a password.  Without it, join the other nodes by hand with the command that is printed.
# SSH_USER       for HOSTFILE (root)
# RAY_PORT, RAY_DASHBOARD_PORT    6379, 8265
# NODES_TIMEOUT_S                 seconds to wait for all nodes (900)
#
# Everything that is started here, on any node, ends with this script, and nothing else.  SLIME_SCRIPT_EXTERNAL_RAY=1
# uses a running cluster.

# host_port HOST PORT: print HOST:PORT, with an IPv6 address in brackets.
host_port() {
    [[ "$1" == *:* ]] && echo "[$1]:$2" || echo "$1:$2"
}

# join_command NODE_ADDRESS NUM_GPUS: print the command that joins a node.  Ray opens its folder to every user, so it is in one
# that only this user enters.
join_command() {
    echo "ray start --address=$(host_port "${MASTER_ADDR}" "${RAY_PORT}") --num-gpus $2 --node-ip-address $1 --disable-usage-stats" \
        '--temp-dir "$(mktemp -d)/ray"'
}

start_nodes() {
    local num_nodes="$1" num_gpus="$2" start=${SECONDS} state
    export MASTER_ADDR="${MASTER_ADDR:-$(hostname -I | awk '{print $1}')}"
    # HTTP between engines on different nodes bypasses proxies.
    export no_proxy="$(_node_addresses | tr '\n' ',')${MASTER_ADDR},${no_proxy}"
    export NO_PROXY="${no_proxy}"
    if [[ -n "${SLIME_SCRIPT_EXTERNAL_RAY:-}" || -n "${SLIME_RAY_STARTED:-}" ]]; then
        start_ray "${num_gpus}"
        return
    fi
    export RAY_PORT="${RAY_PORT:-6379}" RAY_DASHBOARD_PORT="${RAY_DASHBOARD_PORT:-8265}"
    export RAY_API_SERVER_ADDRESS="http://127.0.0.1:${RAY_DASHBOARD_PORT}"
    _RAY_DIR="$(python3 -m slime.utils.files)"
    if [[ -n "${HOSTFILE:-}${RAY_AUTH_TOKEN:-}" ]]; then
        make_token
    else
        # A node that is joined by hand has no token; to require one, set RAY_AUTH_TOKEN and RAY_AUTH_MODE=token on all.
        export RAY_AUTH_MODE=disabled
    fi
    echo "ray: starting the head at $(host_port "${MASTER_ADDR}" "${RAY_PORT}") (dashboard ${RAY_API_SERVER_ADDRESS}, logs ${_RAY_DIR})"
    export _RAY_DIR REPO_DIR
    # One process group: the head, and an ssh to each other node; when the ssh ends, so does its node.
    setsid bash -c "$(declare -f _run_nodes _node_addresses _node_text join_command host_port); _run_nodes ${num_gpus}" >"${_RAY_DIR}/ray-start.log" 2>&1 &
    _RAY_PID=$!
    disown "${_RAY_PID}"
    _watch_ray
    if [[ -z "${HOSTFILE:-}" ]] && ((num_nodes > 1)); then
        echo "ray: HOSTFILE is not set; on each of the other $((num_nodes - 1)) nodes, run"
        echo "    $(join_command "<its address>" "${num_gpus}")"
    fi
    until state="$(_joined "$((num_nodes * num_gpus))")" && _dashboard_answers; do
        if ! kill -0 "${_RAY_PID}" 2>/dev/null; then
            echo "ray: the head exited; logs are kept in ${_RAY_DIR}" >&2
            _show_cause >&2
            return 1
        fi
        if ((SECONDS - start > ${NODES_TIMEOUT_S:-900})); then
            echo "ray: after ${NODES_TIMEOUT_S:-900} s (NODES_TIMEOUT_S) there are ${state:-no nodes}; expected" \
                "${num_nodes} nodes of ${num_gpus} GPUs. See the output of ssh and Ray in ${_RAY_DIR}/ray-start.log." >&2
            return 1
        fi
        sleep 2
    done
    export SLIME_RAY_STARTED=1
    echo "ray: ${state} after $((SECONDS - start)) s"
}

# Print the addresses of HOSTFILE, one per line; none without it.
_node_addresses() {
    [[ -z "${HOSTFILE:-}" ]] || awk 'NF && $1 !~ /^#/ {print $1}' "${HOSTFILE}"
}

# Run the head, and an ssh to each other node of HOSTFILE, in a separate process group.
_run_nodes() {
    local num_gpus="$1" address head mine
    # With Ray's default folder, later programs would join this cluster.
    ray start --head --block --disable-usage-stats --temp-dir "${_RAY_DIR}/ray" \
        --node-ip-address "${MASTER_ADDR}" --port "${RAY_PORT}" \
        --num-gpus "${num_gpus}" --dashboard-host 127.0.0.1 --dashboard-port "${RAY_DASHBOARD_PORT}" &
    head=$!
    if [[ -n "${HOSTFILE:-}" ]]; then
        # A second node here would bring the GPUs of this machine twice.
        mine=" ${MASTER_ADDR} $(hostname) $(hostname -f 2>/dev/null) $(hostname -I 2>/dev/null) "
        for address in $(_node_addresses); do
            [[ "${mine}" == *" ${address} "* ]] && continue
            echo "starting a node on ${address}"
            # The token goes through stdin, which no process list shows; the end of stdin ends the node.
            { cat "${RAY_AUTH_TOKEN_PATH}"; sleep infinity; } | ssh -o BatchMode=yes -o ConnectTimeout=20 \
                -o ServerAliveInterval=15 "${SSH_USER:-root}@${address}" \
                "REPO_DIR='${REPO_DIR}' JOIN='$(join_command "${address}" "${num_gpus}") --block' bash -c '$(_node_text)'" &
        done
    fi
    wait "${head}"
}

# Print the script of a node: it joins, with retries while the head is starting, and ends with its stdin.
_node_text() {
    cat <<'NODE'
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$(mktemp)"
trap "rm -f $RAY_AUTH_TOKEN_PATH" EXIT
read -r token
echo "$token" >"$RAY_AUTH_TOKEN_PATH"
exec 3<&0
[ -x "$REPO_DIR/.venv/bin/ray" ] && PATH="$REPO_DIR/.venv/bin:$PATH"
for attempt in 1 2 3 4 5 6; do
    eval "exec $JOIN" &
    node=$!
    (cat <&3 >/dev/null; kill -TERM $node $$) &
    watcher=$!
    wait $node && break
    kill $watcher
    sleep 5
done
NODE
}

# _joined NUM_GPUS: print the nodes and GPUs of the cluster; succeed when it has that many GPUs.
_joined() {
    RAY_ADDRESS="$(host_port "${MASTER_ADDR}" "${RAY_PORT}")" timeout 60 python3 - "$1" 2>/dev/null <<'PY'
import sys
import ray

ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
nodes = [node for node in ray.nodes() if node["Alive"]]
gpus = int(sum(node["Resources"].get("GPU", 0) for node in nodes))
print(f"{len(nodes)} nodes with {gpus} GPUs")
sys.exit(gpus < int(sys.argv[1]))
PY
}
