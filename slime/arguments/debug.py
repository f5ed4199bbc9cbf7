"""Flags to run one half of the job alone, record and replay its data, profile it, and check it in CI."""

from __future__ import annotations

import argparse

from slime.arguments.kinds import non_negative_int, number_in, positive_int


def add_debug_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the debug, profile and CI groups to ``parser``."""
    _add_debug(parser)
    _add_profile(parser)
    _add_ci(parser)


def _add_debug(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("debug", "Half of the job alone; recorded data.")
    group.add_argument(
        "--plan",
        nargs="?",
        choices=["table", "json"],
        const="table",
        default=None,
        help="Say what the run would be (layout, memory, traffic) and end; needs no GPU, cluster or checkpoint.",
    )
    group.add_argument("--debug-rollout-only", action="store_true", help="Start the engines only; train nothing.")
    group.add_argument("--debug-train-only", action="store_true", help="Start the trainer only; no engine runs.")
    group.add_argument(
        "--save-debug-rollout-data",
        default=None,
        metavar="TEMPLATE",
        help="File for each rollout's samples; has {rollout_id}.",
    )
    group.add_argument(
        "--load-debug-rollout-data",
        default=None,
        metavar="TEMPLATE",
        help="Train on samples saved before, instead of generating; implies --debug-train-only.",
    )
    group.add_argument(
        "--load-debug-rollout-data-subsample",
        type=number_in(0.0, 1.0, low_open=True),
        default=None,
        help="Fraction of them to use, in (0, 1].",
    )
    group.add_argument(
        "--load-forge-rollout-data", default=None, metavar="TEMPLATE", help="Replay saved samples while engines run."
    )
    group.add_argument(
        "--save-debug-train-data",
        default=None,
        metavar="TEMPLATE",
        help="File for what each rollout was trained on, all ranks together; has {rollout_id}.",
    )
    group.add_argument(
        "--dump-details", default=None, metavar="DIR", help="Folder for both dumps; sets the two flags above."
    )
    group.add_argument(
        "--custom-config-path",
        default=None,
        metavar="YAML",
        help="Each top-level key becomes an attribute of args, over the flags; may carry a plug-in's settings.",
    )


def _add_profile(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("profile", "Memory snapshots and traces of the trainer.")
    group.add_argument("--record-memory-history", action="store_true", help="Record the trainer's GPU allocations.")
    group.add_argument("--memory-snapshot-dir", default=".", metavar="DIR", help="Folder of the snapshots.")
    group.add_argument(
        "--memory-snapshot-num-steps", type=positive_int, default=None, help="Steps after which recording stops."
    )
    group.add_argument(
        "--use-pytorch-profiler", action="store_true", help="Profile the trainer's main rank with torch's profiler."
    )
    group.add_argument(
        "--profile-step-start", type=non_negative_int, default=10, help="First rollout that is profiled, from 0."
    )
    group.add_argument(
        "--profile-step-end", type=non_negative_int, default=12, help="The rollout before which profiling stops."
    )
    group.add_argument(
        "--tensorboard-dir", default=None, metavar="DIR", help="Folder of the profiles. Default: profile."
    )
    group.add_argument("--memory-recorder", choices=["torch", "memray"], default="torch", help="What records.")
    group.add_argument(
        "--profile-target",
        nargs="+",
        choices=["train_overall", "train_actor", "train_log_probs"],
        default=["train_overall"],
        help="Which part of training is profiled.",
    )


def _add_ci(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("CI", "Checks that end a run when a number is off.")
    group.add_argument("--ci-test", action="store_true", help="Turn the checks on.")
    group.add_argument("--ci-disable-kl-checker", action="store_true", help="Leave the KL checks off.")
    group.add_argument(
        "--ci-train-rollout-logprob-abs-diff-threshold",
        type=float,
        default=0.1,
        help="Largest mean |trainer - engine| log-prob (nats).",
    )
    group.add_argument("--ci-save-grad-norm", default=None, metavar="TEMPLATE", help="File for gradient norms.")
    group.add_argument("--ci-load-grad-norm", default=None, metavar="TEMPLATE", help="File of norms to compare with.")
