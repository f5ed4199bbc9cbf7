"""Flags of the profiler."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from slime.flags.config import FlagConfig
from slime.flags.group import FlagGroup
from slime.flags.kinds import file_path, non_negative_int, positive_int
from slime.flags.observability import add_observability_arguments


def add_profiler_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the profile group to ``parser``."""
    group = parser.add_argument_group("profile", "Memory snapshots and traces of the trainer.")
    group.add_argument("--record-memory-history", action="store_true", help="Record the trainer's GPU allocations.")
    group.add_argument(
        "--memory-snapshot-dir", default=".", type=file_path, metavar="DIR", help="Folder for memory snapshots."
    )
    group.add_argument("--memory-snapshot-num-steps", type=positive_int, help="Steps to record GPU allocations for.")
    group.add_argument(
        "--use-pytorch-profiler", action="store_true", help="Profile the trainer's main rank with torch.profiler."
    )
    group.add_argument(
        "--profile-step-start", type=non_negative_int, default=10, help="First rollout to profile, from 0."
    )
    group.add_argument(
        "--profile-step-end", type=non_negative_int, default=12, help="Stop profiling before this rollout."
    )
    group.add_argument(
        "--memory-recorder", choices=["torch", "memray"], default="torch", help="Recorder of GPU allocations."
    )
    group.add_argument(
        "--profile-target",
        nargs="+",
        choices=["train_overall", "train_actor", "train_log_probs"],
        default=["train_overall"],
        help="Part of training to profile.",
    )


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(FlagConfig, flags=(add_profiler_arguments, add_observability_arguments)):
    """Profiles and memory snapshots of the trainer."""

    use_pytorch_profiler: bool
    profile_target: list[str]
    profile_step_start: int
    profile_step_end: int
    tensorboard_dir: str | None
    record_memory_history: bool
    memory_snapshot_dir: str
    memory_snapshot_num_steps: int | None


def check_profiler(args: Namespace) -> Iterator[str]:
    """Yield a message for a profile of nothing, and for a recorder that there is not yet."""
    if args.memory_recorder != "torch":
        yield f"--memory-recorder is {args.memory_recorder!r}: memory is recorded by torch only. Leave the flag out."
    if args.use_pytorch_profiler and args.profile_step_end <= args.profile_step_start:
        yield (
            f"--profile-step-end {args.profile_step_end} leaves nothing to profile from --profile-step-start "
            f"{args.profile_step_start} on; raise it."
        )


GROUP = FlagGroup(add_profiler_arguments, check=(check_profiler,))
