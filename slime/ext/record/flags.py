"""Flags of what a run leaves and shows for people to look at."""

from __future__ import annotations

import argparse
from argparse import Namespace
from dataclasses import dataclass

from slime.flags.config import FlagConfig
from slime.flags.group import FlagGroup
from slime.flags.kinds import non_negative_int, port_number, positive_float


def _sample_count(text: str) -> int | None:
    return None if text == "all" else non_negative_int(text)


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the record group to ``parser``."""
    record = parser.add_argument_group("record", "What a run leaves in its folder for people to look at.")
    record.add_argument(
        "--no-record",
        dest="record",
        action="store_false",
        default=True,
        help="Write no config, events, spans and samples into the run's folder (--save, else runs/ and the run's id).",
    )
    record.add_argument(
        "--record-samples",
        type=_sample_count,
        metavar="N",
        help="Samples of each rollout that are recorded, or all. Default: all.",
    )
    record.add_argument(
        "--record-max-gib",
        type=positive_float,
        default=20.0,
        help="GiB of recorded samples; above that those of the oldest rollouts are removed.",
    )
    record.add_argument(
        "--prometheus-port",
        type=port_number,
        help="Serve one Prometheus page of the whole job at this port of the driver's machine: what is logged, the "
        "state of the engines, and the pages of engines and routers.",
    )


@dataclass(frozen=True, kw_only=True)
class RecordConfig(FlagConfig, flags=(add_record_arguments,)):
    """What of its samples a run records."""

    record_samples: int | None
    record_max_gib: float
    reward_key: str | None = None
    """Entry of a dict reward that statistics read."""
    eval_reward_key: str | None = None
    """The same in evaluations."""


def derive_expert_load(args: Namespace) -> None:
    """Turn on what the job's Prometheus page shows."""
    if args.log_expert_load is None:
        args.log_expert_load = args.prometheus_port is not None


GROUP = FlagGroup(add_record_arguments, derive=(derive_expert_load,))
