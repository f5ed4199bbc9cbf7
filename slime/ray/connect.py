"""The way into a Ray cluster: the one that is named, or that this user runs here, else a private one."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
from argparse import Namespace
from pathlib import Path

import ray
import torch
from ray._private import ray_constants
from ray._private.authentication import authentication_token_setup as ray_token
from ray._raylet import Config  # type: ignore[attr-defined]

from slime.flags.cluster import plan_gpus
from slime.ray.own_cluster import own_cluster
from slime.ray.ray_servers import leave_ray
from slime.utils import env
from slime.utils.errors import ConfigError
from slime.utils.private_folder import RAY, new_ray_folder, remove_ray_folder

logger = logging.getLogger(__name__)

START_ATTEMPTS = 3
CONNECT_TIMEOUT_S = 120.0
_FOLDERS: list[Path] = []
"""The folder of the private cluster, until the job leaves it."""


def connect(args: Namespace) -> None:
    """Join the Ray cluster of ``RAY_ADDRESS``, else this user's on this machine; without one, start a private one.

    ``RAY_ADDRESS=local`` asks for a private one outright.  The private cluster of a machine without GPUs has as many
    logical GPUs as the run needs.

    Raises:
        ConfigError: a cluster is there but does not let this process in, or none is where ``RAY_ADDRESS`` says.
    """
    if ray.is_initialized():
        return
    if args.wandb_key is not None:
        env.unset("WANDB_API_KEY")  # in the environment of every process it would be there for model-written code
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
    num_gpus = None if torch.cuda.is_available() else plan_gpus(args).num_gpus
    num_cpus = None if num_gpus is None else 2 * num_gpus + 4
    logger.info(
        "no Ray cluster is named, and this user runs none here: starting a private one (%s logical GPUs)",
        num_gpus or "no",
    )
    _start(num_gpus, num_cpus)


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

    In a thread of its own, because Ray tries for many minutes to join a cluster whose token it does not have.
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
