"""Logs: Weights & Biases, TensorBoard, extra metrics."""

from __future__ import annotations

import argparse


def add_observability_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the Weights & Biases, TensorBoard and metrics groups to ``parser``."""
    wandb = parser.add_argument_group("Weights & Biases", "One run for the whole job.")
    wandb.add_argument("--use-wandb", action="store_true", help="Log to Weights & Biases.")
    wandb.add_argument(
        "--wandb-mode",
        choices=["online", "offline", "disabled"],
        default=None,
        help="offline writes to --wandb-dir only.",
    )
    wandb.add_argument("--wandb-dir", default=None, metavar="DIR", help="Folder of its files.")
    wandb.add_argument("--wandb-key", default=None, help="API key.")
    wandb.add_argument("--wandb-host", default=None, help="Address of a server other than the public one.")
    wandb.add_argument("--wandb-team", default=None, help="Team or user that owns the run.")
    wandb.add_argument("--wandb-group", default=None, help="Group of the run.")
    wandb.add_argument("--wandb-project", default=None, help="Project of the run.")
    wandb.add_argument("--wandb-run-id", default=None, help="Id of a run to go on with.")
    wandb.add_argument(
        "--disable-wandb-random-suffix",
        dest="wandb_random_suffix",
        action="store_false",
        default=True,
        help="Leave the random end off the group's name.",
    )
    wandb.add_argument(
        "--wandb-always-use-train-step", action="store_true", help="Count steps, not rollouts, on the x axis."
    )

    tensorboard = parser.add_argument_group("TensorBoard")
    tensorboard.add_argument("--use-tensorboard", action="store_true", help="Write TensorBoard files.")
    tensorboard.add_argument("--tb-project-name", default=None, help="First part of their folder.")
    tensorboard.add_argument("--tb-experiment-name", default=None, help="Second part of their folder.")

    metrics = parser.add_argument_group("metrics", "Metrics beyond the usual ones.")
    metrics.add_argument("--log-multi-turn", action="store_true", help="Metrics of turns within a response.")
    metrics.add_argument(
        "--log-passrate",
        action="store_true",
        help="pass@k of each rollout and evaluation, over the answers to each prompt.",
    )
    metrics.add_argument("--log-reward-category", default=None, metavar="KEY", help="Entry of dict rewards to count.")
    metrics.add_argument("--log-correct-samples", action="store_true", help="Statistics of the samples with reward 1.")
