"""Flags of trackio and MLflow."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec

from slime.flags.group import FlagGroup


def add_tracker_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the trackers group to ``parser``."""
    group = parser.add_argument_group("trackers", "Other trackers that the metrics go to.")
    group.add_argument("--use-trackio", action="store_true", help="Log to trackio, in TRACKIO_DIR of this machine.")
    group.add_argument("--trackio-project", default="slime", metavar="NAME", help="Project of the run in trackio.")
    group.add_argument("--use-mlflow", action="store_true", help="Log to MLflow.")
    group.add_argument(
        "--mlflow-uri",
        metavar="URI",
        help="A server's address or sqlite:///FILE. Default: mlflow.db in the run's folder.",
    )
    group.add_argument("--mlflow-experiment", default="slime", metavar="NAME", help="Experiment of the run in MLflow.")


def check_trackers(args: Namespace) -> Iterator[str]:
    """Yield a message for each tracker that is asked for and not installed."""
    for name, is_wanted in (("trackio", args.use_trackio), ("mlflow", args.use_mlflow)):
        if is_wanted and args.runs_here and find_spec(name) is None:
            yield f"--use-{name} needs the package {name}; pip install -e '.[{name}]', or drop the flag."


GROUP = FlagGroup(add_tracker_arguments, check=(check_trackers,))
