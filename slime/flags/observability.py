"""Flags of the metrics of a run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from slime.flags.algorithm import add_algorithm_arguments
from slime.flags.checkpoint import add_checkpoint_arguments
from slime.flags.cluster import add_cluster_arguments
from slime.flags.config import FlagConfig
from slime.flags.data import add_eval_arguments
from slime.flags.group import FlagGroup
from slime.flags.kinds import file_path
from slime.flags.reward import add_reward_arguments
from slime.flags.rollout import add_rollout_arguments


def wandb_name(value: str) -> str:
    """Return ``value`` if Weights & Biases accepts it as the name of a project or a run."""
    if len(value) > 128 or any(letter in "/\\#?%:" or not letter.isprintable() for letter in value):
        raise argparse.ArgumentTypeError(
            f"{value!r} is no name for Weights & Biases; it may have 128 characters, and none of / \\ # ? % :"
        )
    return value


def add_observability_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the metrics group to ``parser``."""
    metrics = parser.add_argument_group("metrics", "Additional metrics.")
    metrics.add_argument(
        "--wandb-run-id",
        type=wandb_name,
        help="Id of the run, also in Weights & Biases; an existing run with this id is continued.",
    )
    metrics.add_argument(
        "--wandb-always-use-train-step",
        action="store_true",
        help="Use optimizer steps, not rollouts, as the x axis of trackers.",
    )
    metrics.add_argument(
        "--tensorboard-dir",
        type=file_path,
        metavar="DIR",
        help="Folder for TensorBoard files and profiles; the variable TENSORBOARD_DIR overrides it for the former. "
        "Default: tensorboard_log/PROJECT/EXPERIMENT, and profile.",
    )
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
        "--log-expert-load",
        action=argparse.BooleanOptionalAction,
        help="Log how evenly tokens are spread over each layer's experts. Default: on with --prometheus-port.",
    )


@dataclass(frozen=True, kw_only=True)
class TrackingConfig(FlagConfig, flags=(add_observability_arguments, add_checkpoint_arguments)):
    """The folder of a run, its id, and the x axis of its metrics."""

    save: str | None
    wandb_run_id: str | None
    wandb_always_use_train_step: bool
    run_folder: str | None = None
    """Folder of a critic's run, whose checkpoints are in another folder."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(
    FlagConfig,
    flags=(
        add_observability_arguments,
        add_reward_arguments,
        add_rollout_arguments,
        add_eval_arguments,
        add_algorithm_arguments,
        add_cluster_arguments,
    ),
):
    """Settings of the metrics of samples, for a rollout or an evaluation."""

    advantage_estimator: str
    loss_type: str
    rollout_num_gpus: int | None
    n_samples_per_prompt: int = 1
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
        """False for supervised training, whose samples are read from a file with a placeholder reward."""
        return self.loss_type != "sft_loss"


GROUP = FlagGroup(add_observability_arguments)
