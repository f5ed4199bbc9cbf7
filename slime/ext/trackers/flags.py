"""Flags of Weights & Biases, TensorBoard, trackio and MLflow."""

from __future__ import annotations

import argparse
import configparser
import logging
import netrc
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from slime.flags.config import FlagConfig
from slime.flags.group import FlagGroup
from slime.flags.kinds import file_path, http_url
from slime.flags.observability import add_observability_arguments, wandb_name
from slime.flags.security import secret_of_file
from slime.utils import env

logger = logging.getLogger(__name__)

WANDB_VARIABLE = "WANDB_API_KEY"


def add_tracker_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the groups of the trackers to ``parser``."""
    wandb = parser.add_argument_group("Weights & Biases", "One run for the whole job.")
    wandb.add_argument("--use-wandb", action="store_true", help="Log to Weights & Biases.")
    wandb.add_argument(
        "--wandb-mode",
        choices=["online", "offline", "disabled"],
        help="Mode of Weights & Biases; offline writes to --wandb-dir only.",
    )
    wandb.add_argument("--wandb-dir", type=file_path, metavar="DIR", help="Folder for the files of Weights & Biases.")
    wandb.add_argument(
        "--wandb-key",
        help="API key of Weights & Biases; every user of this machine can read it in the list of processes. Better: "
        "--wandb-key-file, or the variable WANDB_API_KEY.",
    )
    wandb.add_argument("--wandb-key-file", type=file_path, metavar="FILE", help="File with the key.")
    wandb.add_argument("--wandb-host", type=http_url, help="Address of your own Weights & Biases server.")
    wandb.add_argument("--wandb-team", help="Team or user that owns the run in Weights & Biases.")
    wandb.add_argument("--wandb-group", help="Group of the run in Weights & Biases.")
    wandb.add_argument("--wandb-project", type=wandb_name, help="Project of the run in Weights & Biases.")
    wandb.add_argument(
        "--disable-wandb-random-suffix",
        dest="wandb_random_suffix",
        action="store_false",
        default=True,
        help="Add no random suffix to --wandb-group.",
    )

    tensorboard = parser.add_argument_group("TensorBoard")
    tensorboard.add_argument("--use-tensorboard", action="store_true", help="Write TensorBoard files.")
    tensorboard.add_argument("--tb-project-name", help="First part of the TensorBoard folder's name.")
    tensorboard.add_argument("--tb-experiment-name", help="Second part of the TensorBoard folder's name.")

    others = parser.add_argument_group("trackers", "Other trackers that the metrics go to.")
    others.add_argument("--use-trackio", action="store_true", help="Log to trackio, in TRACKIO_DIR of this machine.")
    others.add_argument("--trackio-project", default="slime", metavar="NAME", help="Project of the run in trackio.")
    others.add_argument("--use-mlflow", action="store_true", help="Log to MLflow.")
    others.add_argument(
        "--mlflow-uri",
        metavar="URI",
        help="A server's address or sqlite:///FILE. Default: mlflow.db in the run's folder.",
    )
    others.add_argument("--mlflow-experiment", default="slime", metavar="NAME", help="Experiment in MLflow.")


@dataclass(frozen=True, kw_only=True)
class TrackersConfig(FlagConfig, flags=(add_tracker_arguments, add_observability_arguments)):
    """Settings of the trackers."""

    wandb_mode: str | None
    wandb_dir: str | None
    wandb_key: str | None
    wandb_host: str | None
    wandb_team: str | None
    wandb_group: str | None
    wandb_project: str | None
    wandb_random_suffix: bool
    tb_project_name: str | None
    tb_experiment_name: str | None
    tensorboard_dir: str | None
    trackio_project: str
    mlflow_uri: str | None
    mlflow_experiment: str


def derive_wandb_key(args: Namespace) -> None:
    """Read the key of Weights & Biases; the job's processes get it with the flags."""
    if args.wandb_key is None:
        path = args.wandb_key_file
        args.wandb_key = (
            secret_of_file(Path(path), "--wandb-key-file", make=False) if path else env.get_str(WANDB_VARIABLE)
        )
    else:
        logger.warning(
            "--wandb-key: every user of this host sees the key in the list of processes; give --wandb-key-file or "
            "WANDB_API_KEY instead."
        )
    if args.wandb_key is not None:
        args.driver_variables.append(WANDB_VARIABLE)


def check_trackers(args: Namespace) -> Iterator[str]:
    """Yield a message for each tracker that is asked for and not installed, or would not let this run in."""
    if not args.runs_here:
        return
    for name, extra, is_wanted in (
        ("wandb", "tracking", args.use_wandb and args.wandb_mode != "disabled"),
        ("tensorboard", "tracking", args.use_tensorboard),
        ("trackio", "trackio", args.use_trackio),
        ("mlflow", "mlflow", args.use_mlflow),
    ):
        if is_wanted and find_spec(name) is None:
            yield f"--use-{name} needs the package {name}; pip install -e '.[{extra}]', or drop the flag."
    needs_key = args.use_wandb and (args.wandb_mode or env.get_str("WANDB_MODE")) not in _WITHOUT_KEY
    if needs_key and args.wandb_key is None and not _is_logged_in(args.wandb_host) and not _is_offline():
        yield (
            "--use-wandb has no key: set WANDB_API_KEY, give --wandb-key-file, or run wandb login; --wandb-mode "
            "offline needs none."
        )


_WITHOUT_KEY = ("offline", "disabled", "dryrun")
"""Modes of Weights & Biases that need no key."""


def _is_logged_in(host: str | None) -> bool:
    """Return True when ``wandb login`` has left a key in the user's netrc."""
    address = host or env.get_str("WANDB_BASE_URL") or "https://api.wandb.ai"
    try:
        return netrc.netrc(env.get_str("NETRC")).authenticators(str(urlsplit(address).hostname)) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _is_offline() -> bool:
    """Return True where ``wandb offline`` was called: it leaves a file in the working directory."""
    settings = configparser.ConfigParser()
    settings.read("wandb/settings")
    return settings.get("default", "mode", fallback="") == "offline"


GROUP = FlagGroup(add_tracker_arguments, derive=(derive_wandb_key,), check=(check_trackers,))
