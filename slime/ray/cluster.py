"""A job's Ray cluster: how this process joins or starts it, checks that its servers are alive, and leaves it.

A job uses the cluster named by ``RAY_ADDRESS``, else one that this user runs on this machine, else a private one.
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
"""How long the GCS may be silent, for example while its owner restarts it; after 60 s Ray would end the process."""
LEAVE_TIMEOUT_S = 20.0
"""Time for ``ray.shutdown``, which notifies both the GCS and the raylet."""
LOG_TAIL_LINES = 10
NEEDED = (ray_constants.PROCESS_TYPE_GCS_SERVER, ray_constants.PROCESS_TYPE_RAYLET)
_FOLDERS: list[Path] = []
"""The private cluster's folder, until the job leaves the cluster."""


def connect(args: Namespace) -> None:
    """Join the Ray cluster at ``RAY_ADDRESS``, else this user's cluster on this machine, else start a private one.

    ``RAY_ADDRESS=local`` always starts a private one.  On a machine without GPUs a private cluster declares as many
    logical GPUs as the run needs.

    Raises:
        ConfigError: the cluster refuses this process, no cluster answers at ``RAY_ADDRESS``, or a private cluster,
            which no other machine can join, would be too small.
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
            logger.info("joined the Ray cluster at %s", address)
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
        "RAY_ADDRESS names no Ray cluster and this user runs none here: starting a private one (%s logical GPUs)",
        num_gpus or "no",
    )
    _start(num_gpus, num_cpus)


def _gpus_of_private_cluster(args: Namespace) -> int | None:
    """Return how many logical GPUs to declare; None to use this machine's real ones."""
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
    """Leave the cluster.  A private cluster ends, and its folder is removed unless ``keeps_logs``."""
    if ray.is_initialized():
        leave_ray()
    while _FOLDERS:
        folder = _FOLDERS.pop()
        if keeps_logs:
            (folder / "token").unlink(missing_ok=True)
            logger.info("Ray's logs are kept in %s", folder)
        else:
            remove_ray_folder(folder)


def _start(num_gpus: int | None, num_cpus: int | None) -> None:
    """Start a private cluster.  Ray allows its processes 30 seconds, which a busy machine may exceed, so this retries.

    Must run in the main thread: Ray's servers exit with the thread that started them.
    """
    # Otherwise Ray replaces loopback by the address of the outgoing interface.  Ray's processes read the variable.
    ray_constants.ENABLE_RAY_CLUSTER = False
    env.export({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"})
    folder = new_ray_folder()
    _FOLDERS.append(folder)
    atexit.register(disconnect, keeps_logs=True)  # for drivers that do not call disconnect
    _make_token(folder)
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(
                address="local",
                num_gpus=num_gpus,
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=True,
                logging_level=_client_level(),
                _temp_dir=str(folder / RAY),
                _system_config={"prestart_worker_first_driver": False},  # actors cannot use prestarted workers
            )
            return
        except Exception as error:
            # Ray raises a plain Exception when it times out.
            if "timed out during startup" not in str(error) or attempt == START_ATTEMPTS:
                raise
            logger.warning("Attempt %d of %d to start Ray failed: %s", attempt, START_ATTEMPTS, error)


def _client_level() -> int:
    """Return the level of Ray's client: its lines of a start that went well are for ``--verbose``."""
    return logging.INFO if logger.isEnabledFor(logging.DEBUG) else logging.WARNING


def _make_token(folder: Path) -> None:
    """Write Ray's token to a file that only this user can read: plug-ins and their children see the environment."""
    if env.get_str("RAY_AUTH_MODE", "token") != "token" or env.get_str("RAY_AUTH_TOKEN_PATH") is not None:
        return
    with open(os.open(folder / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(env.get_str("RAY_AUTH_TOKEN") or secrets.token_hex(32))
    env.unset("RAY_AUTH_TOKEN")
    env.export({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")})
    ray_token.AuthenticationTokenLoader.instance().reset_cache()  # both were read when Ray was imported
    Config.initialize("")


def _join(address: str) -> Exception | None:
    """Join a running cluster within a deadline; return the error, or None on success.

    Runs in another thread because Ray retries for many minutes when it lacks the cluster's token.
    """
    outcome: list[Exception | None] = []

    def initialise() -> None:
        try:
            ray.init(address=address, log_to_driver=True, logging_level=_client_level())
            outcome.append(None)
        except Exception as error:  # returned by the waiting thread
            outcome.append(error)

    thread = threading.Thread(target=initialise, name="ray-init", daemon=True)
    thread.start()
    thread.join(CONNECT_TIMEOUT_S)
    if not outcome:
        return ConfigError(
            f"the Ray cluster at {address} did not let this process in within {CONNECT_TIMEOUT_S:.0f} s. "
            "If this is the wrong cluster, set RAY_ADDRESS (RAY_ADDRESS=local starts a private one); otherwise give "
            "this process its token (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)."
        )
    return outcome[0]


# The cluster of this user


def own_cluster() -> str | None:
    """Return the address of the cluster that this user started here with ``ray start``, or None.

    Any user may have written Ray's address file.  The address is therefore taken from the flags of a raylet that this
    user runs, and the file only chooses among several.  The cluster at that address receives the job's code, flags
    and secret.
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
            "Not joining the Ray cluster on this machine: %s. To join it anyway, set RAY_ADDRESS to its address.",
            error,
        )
        return None
    return address


def _check_sockets(raylet: Mapping[str, str]) -> None:
    """Check that this user owns a raylet's sockets: anybody may write to /tmp/ray."""
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
    """Checks that the GCS and this node's raylet are alive."""

    def __init__(self) -> None:
        self._next_check_s = self._answered_s = 0.0

    def check(self) -> None:
        """Raise if the raylet or the GCS has ended or is silent.  Does nothing in actors, which end with the raylet.

        Raises:
            ProcessError: one has ended (the message has the end of its log if this process started it) or is silent.
        """
        worker = ray._private.worker
        if worker.global_worker.mode != ray.SCRIPT_MODE:
            return
        node = worker._global_node
        for kind, process in node.dead_processes():
            if kind in NEEDED:
                raise ProcessError(
                    f"Ray's {kind} (process {process.pid}) ended with status {process.returncode}, and the job cannot "
                    f"continue without it (-9: killed, often because memory ran out)\n{_log_tails(node, kind)}"
                )
        if time.monotonic() >= self._next_check_s:
            self._ask(worker.global_worker)
            self._next_check_s = time.monotonic() + CHECK_EVERY_S

    def _ask(self, worker: Any) -> None:
        began_s = time.monotonic()
        if began_s > self._next_check_s + SILENT_S:  # no check ran meanwhile, so silence cannot be measured
            self._answered_s = began_s
        own_node = NodeID.from_hex(ray.get_runtime_context().get_node_id())
        try:
            (is_alive,) = worker.gcs_client.check_alive([own_node], ANSWER_TIMEOUT_S)
        except RpcError as error:
            silent_s = time.monotonic() - self._answered_s
            if silent_s > SILENT_S:
                raise ProcessError(
                    f"Ray's gcs_server at {worker.gcs_client.address} has not answered for {silent_s:.0f} s: its "
                    f"process or its node is stopped or has ended ({error})"
                ) from error
            return
        self._answered_s = time.monotonic()
        if not is_alive:
            raise ProcessError(
                "Ray considers the driver's node dead: its raylet has ended, is stopped, or is too busy to "
                f"answer the GCS. Ray's logs are in {ray._private.worker._global_node.get_logs_dir_path()}"
            )


RAY_SERVERS = RayServers()
"""The servers of this process's cluster."""


def leave_ray() -> None:
    """Leave the cluster; a private one is ended.  Takes a bounded time even if Ray's processes hang or are gone.

    ``ray.shutdown`` alone would wait forever for the GCS and the raylet.
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
