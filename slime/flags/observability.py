"""Logs: Weights & Biases, TensorBoard, extra metrics."""

from __future__ import annotations

import argparse
import configparser
import logging
import netrc
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.flags.algorithm import add_algorithm_arguments
from slime.flags.checkpoint import add_checkpoint_arguments
from slime.flags.cluster import add_cluster_arguments
from slime.flags.config import read_config
from slime.flags.data import add_eval_arguments
from slime.flags.group import FlagGroup
from slime.flags.kinds import file_path, http_url
from slime.flags.reward import add_reward_arguments
from slime.flags.rollout import add_rollout_arguments
from slime.flags.security import secret_of_file
from slime.utils import env

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Settings of the trackers that a run's metrics are sent to."""

    save: str | None
    num_rollout: int | None
    use_wandb: bool
    wandb_mode: str | None
    wandb_dir: str | None
    wandb_key: str | None
    wandb_host: str | None
    wandb_team: str | None
    wandb_group: str | None
    wandb_project: str | None
    wandb_run_id: str | None
    wandb_random_suffix: bool
    wandb_always_use_train_step: bool
    use_tensorboard: bool
    tb_project_name: str | None
    tb_experiment_name: str | None
    run_folder: str | None = None
    """Of a critic, whose checkpoints lie elsewhere."""


def tracking_config(args: Any) -> TrackingConfig:
    """Return where ``args``, complete or not, says that metrics go."""
    groups = (add_observability_arguments, add_checkpoint_arguments, add_rollout_arguments)
    return read_config(TrackingConfig, args, *groups)


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Settings of the metrics of a rollout's or an evaluation's samples."""

    advantage_estimator: str
    loss_type: str
    rollout_num_gpus: int | None
    n_samples_per_prompt: int
    n_samples_per_eval_prompt: int
    reward_key: str | None
    log_multi_turn: bool
    log_passrate: bool
    log_reward_category: str | None
    log_correct_samples: bool
    sglang_speculative_algorithm: str | None = None
    eval_datasets: list[Any] | None = None

    @property
    def has_rewards(self) -> bool:
        """False for supervised training: its samples are read from a file, and their reward is a filler."""
        return self.loss_type != "sft_loss"


def metrics_config(args: Any) -> MetricsConfig:
    """Return what ``args``, complete or not, says is computed from samples."""
    return read_config(
        MetricsConfig,
        args,
        add_observability_arguments,
        add_reward_arguments,
        add_rollout_arguments,
        add_eval_arguments,
        add_algorithm_arguments,
        add_cluster_arguments,
    )


def _wandb_name(value: str) -> str:
    """Return a name that Weights & Biases takes for a project or a run."""
    if len(value) > 128 or any(letter in "/\\#?%:" or not letter.isprintable() for letter in value):
        raise argparse.ArgumentTypeError(
            f"{value!r} is no name for Weights & Biases; it may have 128 characters, and none of / \\ # ? % :"
        )
    return value


def add_observability_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the Weights & Biases, TensorBoard and metrics groups to ``parser``."""
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
    wandb.add_argument("--wandb-project", type=_wandb_name, help="Project of the run in Weights & Biases.")
    wandb.add_argument("--wandb-run-id", type=_wandb_name, help="Id of the Weights & Biases run to continue.")
    wandb.add_argument(
        "--disable-wandb-random-suffix",
        dest="wandb_random_suffix",
        action="store_false",
        default=True,
        help="Add no random suffix to --wandb-group.",
    )
    wandb.add_argument(
        "--wandb-always-use-train-step",
        action="store_true",
        help="Use optimizer steps, not rollouts, as the x axis in Weights & Biases.",
    )

    tensorboard = parser.add_argument_group("TensorBoard")
    tensorboard.add_argument("--use-tensorboard", action="store_true", help="Write TensorBoard files.")
    tensorboard.add_argument("--tb-project-name", help="First part of the TensorBoard folder's name.")
    tensorboard.add_argument("--tb-experiment-name", help="Second part of the TensorBoard folder's name.")

    metrics = parser.add_argument_group("metrics", "Additional metrics.")
    metrics.add_argument("--log-multi-turn", action="store_true", help="Log metrics of the turns within a response.")
    metrics.add_argument(
        "--log-passrate",
        action="store_true",
        help="Log pass@k of each rollout and evaluation, over the responses to each prompt.",
    )
    metrics.add_argument(
        "--log-reward-category", metavar="KEY", help="Entry of dict rewards whose values are counted in the log."
    )
    metrics.add_argument(
        "--log-correct-samples", action="store_true", help="Log statistics of the samples with reward 1."
    )
    metrics.add_argument(
        "--log-expert-load", action="store_true", help="Log how evenly tokens are spread over each layer's experts."
    )


def check_wandb(args: Namespace) -> Iterator[str]:
    """Yield a message for a run that Weights & Biases would not let in."""
    mode = args.wandb_mode or env.get_str("WANDB_MODE")
    if not args.use_wandb or not args.runs_here or mode in ("offline", "disabled", "dryrun"):
        return
    if args.wandb_key is None and not _is_logged_in(args.wandb_host) and not _is_offline():
        yield (
            "--use-wandb has no key: set WANDB_API_KEY, give --wandb-key-file, or run wandb login; --wandb-mode "
            "offline needs none."
        )


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


def derive_observability(args: Namespace) -> None:
    """Read the key of Weights & Biases."""
    if args.wandb_key is None:
        path = args.wandb_key_file
        args.wandb_key = secret_of_file(Path(path), "--wandb-key-file", make=False) if path else env.wandb_api_key()
    else:
        logger.warning(
            "--wandb-key: every user of this host sees the key in the list of processes; give --wandb-key-file or "
            "WANDB_API_KEY instead."
        )


GROUP = FlagGroup(add_observability_arguments, derive=(derive_observability,), check=(check_wandb,))
