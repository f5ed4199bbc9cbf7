"""The Ray cluster of a job: how this process joins or starts one, sees that its servers live, and leaves it.

The cluster is the one that ``RAY_ADDRESS`` names, or that this user runs on this machine, else a private one.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray._private import ray_constants
from ray._private.authentication import authentication_token_setup as ray_token
from ray._private.utils import get_ray_address_file
from ray._raylet import Config, NodeID  # type: ignore[attr-defined]
from ray.exceptions import RpcError

from slime.flags.cluster import plan_gpus
from slime.utils import env
from slime.utils.errors import ConfigError, ProcessError
from slime.utils.files import RAY, new_ray_folder, problem_of, remove_ray_folder

logger = logging.getLogger(__name__)

START_ATTEMPTS = 3
CONNECT_TIMEOUT_S = 120.0
CHECK_EVERY_S = 3.0
ANSWER_TIMEOUT_S = 3.0
SILENT_S = 45.0
"""Time for the GCS to answer again, as one does that its owner restarts; after 60 s Ray would end the process."""
LEAVE_TIMEOUT_S = 20.0
"""Time for the driver to leave the cluster, which it tells both."""
LOG_TAIL_LINES = 10
NEEDED = (ray_constants.PROCESS_TYPE_GCS_SERVER, ray_constants.PROCESS_TYPE_RAYLET)
_FOLDERS: list[Path] = []
"""The folder of the private cluster, until the job leaves it."""


def connect(args: Namespace) -> None:
    """Join the Ray cluster of ``RAY_ADDRESS``, else this user's on this machine; without one, start a private one.

    ``RAY_ADDRESS=local`` asks for a private one outright.  The private cluster of a machine without GPUs has as many
    logical GPUs as the run needs.

    Raises:
        ConfigError: a cluster is there but does not let this process in, none is where ``RAY_ADDRESS`` says, or a
            private one, which no other machine joins, would be too small.
    """
    if ray.is_initialized():
        return
    env.unset(*vars(args).get("driver_variables", ()))
    address = env.get_str("RAY_ADDRESS") or "auto"
    is_named = address != "auto"
    if not is_named:
        address = own_cluster() or "local"
    if address != "local":
        if not is_named:
            ray_token.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # as Ray does for "auto"
        outcome = _join(address)
        if outcome is None:
            return
        if not isinstance(outcome, ConnectionError):
            raise outcome
        if is_named:
            raise ConfigError(
                f"RAY_ADDRESS is {address}, where no Ray cluster answers ({outcome}). Start it, or correct the "
                "variable; RAY_ADDRESS=local starts a private one."
            ) from outcome
    num_gpus = _gpus_of_private_cluster(args)
    num_cpus = None if num_gpus is None else 2 * num_gpus + 4
    logger.info(
        "no Ray cluster is named, and this user runs none here: starting a private one (%s logical GPUs)",
        num_gpus or "no",
    )
    _start(num_gpus, num_cpus)


def _gpus_of_private_cluster(args: Namespace) -> int | None:
    """Return how many logical GPUs it needs; None for those that this machine has."""
    needed, cores = plan_gpus(args).num_gpus, os.cpu_count() or 1
    if torch.cuda.is_available():
        if (found := torch.cuda.device_count()) < needed:
            raise ConfigError(
                f"the job needs {needed} GPUs; this machine has {found}, and this user runs no Ray cluster here that "
                f"others join. Lower --actor-num-gpus-per-node ({args.actor_num_gpus_per_node}), --actor-num-nodes "
                f"({args.actor_num_nodes}) or --rollout-num-gpus ({args.rollout_num_gpus}), or start one with ray "
                "start --head."
            )
        return None
    name = "actor_num_gpus_per_node"
    if needed > cores and name not in vars(args).get("value_origins", {name: ""}):
        raise ConfigError(
            f"--actor-num-gpus-per-node is not given, and its default makes {needed} processes that train or generate "
            f"on this machine, which has no GPU and {cores} cores. Give --actor-num-gpus-per-node 1, or 8 if you mean "
            "it; RAY_ADDRESS names a cluster with GPUs."
        )
    return needed


def disconnect(*, keeps_logs: bool) -> None:
    """Leave the cluster; a private one ends, and its folder goes unless it has the logs of a failure."""
    if ray.is_initialized():
        leave_ray()
    while _FOLDERS:
        folder = _FOLDERS.pop()
        if keeps_logs:
            (folder / "token").unlink(missing_ok=True)
            logger.info("the logs of Ray are kept in %s", folder)
        else:
            remove_ray_folder(folder)


def _start(num_gpus: int | None, num_cpus: int | None) -> None:
    """Start a private cluster.  Ray gives its own processes 30 seconds, which a busy machine may exceed: try again.

    In the main thread: Ray's servers end when the thread that started them does.
    """
    # Without this Ray takes the address of the outgoing interface for loopback; its own processes read the variable.
    ray_constants.ENABLE_RAY_CLUSTER = False
    env.export({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"})
    folder = new_ray_folder()
    _FOLDERS.append(folder)
    atexit.register(disconnect, keeps_logs=True)  # for drivers that do not call it
    _make_token(folder)
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(
                address="local",
                num_gpus=num_gpus,
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=True,
                _temp_dir=str(folder / RAY),
                _system_config={"prestart_worker_first_driver": False},  # no actor of a job can use them
            )
            return
        except Exception as error:
            # Ray raises a plain Exception here.
            if "timed out during startup" not in str(error) or attempt == START_ATTEMPTS:
                raise
            logger.warning("attempt %d of %d to start Ray failed: %s", attempt, START_ATTEMPTS, error)


def _make_token(folder: Path) -> None:
    """Put Ray's token into a file that only this user reads: plug-ins, and what they start, see an environment."""
    if env.get_str("RAY_AUTH_MODE", "token") != "token" or env.get_str("RAY_AUTH_TOKEN_PATH") is not None:
        return
    with open(os.open(folder / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(env.get_str("RAY_AUTH_TOKEN") or secrets.token_hex(32))
    env.unset("RAY_AUTH_TOKEN")
    env.export({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")})
    ray_token.AuthenticationTokenLoader.instance().reset_cache()  # both were read when Ray was imported
    Config.initialize("")


def _join(address: str) -> Exception | None:
    """Join a running cluster, with a deadline; gives the error it ended with.

    In another thread, because Ray tries for many minutes to join a cluster whose token it does not have.
    """
    outcome: list[Exception | None] = []

    def initialise() -> None:
        try:
            ray.init(address=address, log_to_driver=True)
            outcome.append(None)
        except Exception as error:  # carried to the thread that waits
            outcome.append(error)

    thread = threading.Thread(target=initialise, name="ray-init", daemon=True)
    thread.start()
    thread.join(CONNECT_TIMEOUT_S)
    if not outcome:
        return ConfigError(
            f"the Ray cluster at {address} does not let this process in within {CONNECT_TIMEOUT_S:.0f} s. "
            "If it is not the one you mean, set RAY_ADDRESS (RAY_ADDRESS=local starts a private one); if it is, give "
            "this process its token (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)."
        )
    return outcome[0]


# The cluster of this user


def own_cluster() -> str | None:
    """Return the address of the cluster that this user runs here by ``ray start``; None without one.

    Ray's own file with the address may be any user's.  Here the address is a flag of a raylet that this user runs;
    the file only chooses among several.  Whoever is asked at the address gets the job's code, flags and secret.
    """
    raylets = {words["--gcs-address"]: words for words in _own_raylets() if "--gcs-address" in words}
    try:
        address = Path(get_ray_address_file(None)).read_text(encoding="ascii").strip()
        if address not in raylets:
            return None
        _check_sockets(raylets[address])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        logger.warning(
            "The Ray cluster here is not joined: %s. To join it all the same, give its address by RAY_ADDRESS.",
            error,
        )
        return None
    return address


def _check_sockets(raylet: Mapping[str, str]) -> None:
    """Check that this user owns the sockets of a raylet: /tmp/ray lets everybody write."""
    session = Path(raylet["--session_dir"])
    sockets = [Path(raylet[name]) for name in ("--raylet_socket_name", "--store_socket_name")]
    for path in (session, sockets[0].parent, *sockets):
        if problem := problem_of(path.lstat()):
            raise PermissionError(f"{path} {problem}")


def _own_raylets() -> list[dict[str, str]]:
    """Return the flags of each raylet that this user runs."""
    found = []
    for process in psutil.process_iter(["uids", "cmdline"]):
        words, users = process.info["cmdline"] or [""], process.info["uids"]
        if os.path.basename(words[0]) == "raylet" and users and set(users) == {os.geteuid()}:
            found.append(dict(word.partition("=")[::2] for word in words))
    return found


# Ray's servers


class RayServers:
    """What this process knows of Ray's own."""

    def __init__(self) -> None:
        self._next_check_s = self._answered_s = 0.0

    def check(self) -> None:
        """Raise when the raylet or the GCS has ended or does not answer; an actor, which ends with them, asks nothing.

        Raises:
            ProcessError: one has ended, with the end of its log where this process started it; or does not answer.
        """
        worker = ray._private.worker
        if worker.global_worker.mode != ray.SCRIPT_MODE:
            return
        node = worker._global_node
        for kind, process in node.dead_processes():
            if kind in NEEDED:
                raise ProcessError(
                    f"Ray's {kind} (process {process.pid}) ended with status {process.returncode}, and the job cannot "
                    f"go on without it (-9: killed, often for want of memory)\n{_log_tails(node, kind)}"
                )
        if time.monotonic() >= self._next_check_s:
            self._ask(worker.global_worker)
            self._next_check_s = time.monotonic() + CHECK_EVERY_S

    def _ask(self, worker: Any) -> None:
        began_s = time.monotonic()
        if began_s > self._next_check_s + SILENT_S:  # nobody has asked for so long
            self._answered_s = began_s
        own_node = NodeID.from_hex(ray.get_runtime_context().get_node_id())
        try:
            (is_alive,) = worker.gcs_client.check_alive([own_node], ANSWER_TIMEOUT_S)
        except RpcError as error:
            silent_s = time.monotonic() - self._answered_s
            if silent_s > SILENT_S:
                raise ProcessError(
                    f"Ray's gcs_server at {worker.gcs_client.address} has not answered for {silent_s:.0f} s: its "
                    f"process is stopped or has ended, or its node has ({error})"
                ) from error
            return
        self._answered_s = time.monotonic()
        if not is_alive:
            raise ProcessError(
                "Ray counts this node, the driver's, as dead: its raylet has ended, is stopped, or is too busy to "
                f"answer the GCS. Ray's logs are in {ray._private.worker._global_node.get_logs_dir_path()}"
            )


RAY_SERVERS = RayServers()
"""Those of this process's cluster."""


def leave_ray() -> None:
    """Leave the cluster, a private one by ending it.  Processes of Ray's that hang or are gone keep nobody.

    Ray waits for answers of both without end.
    """
    node = ray._private.worker._global_node
    thread = threading.Thread(target=ray.shutdown, name="leave-ray", daemon=True)
    thread.start()
    thread.join(LEAVE_TIMEOUT_S)
    if thread.is_alive() and node is not None:
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        thread.join(LEAVE_TIMEOUT_S)


def _log_tails(node: Any, kind: str) -> str:
    tails = []
    for path in (Path(node.get_logs_dir_path()) / f"{kind}.{end}" for end in ("out", "err")):
        if path.is_file():
            text = path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            tails.append("\n".join([f"--- end of {path} ---", *text]))
    return "\n".join(tails)
