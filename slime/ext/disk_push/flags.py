"""Flags of weights that travel over a shared disk."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slime.flags.group import FlagGroup, flag_of
from slime.flags.kinds import file_path
from slime.utils.errors import ConfigError


def add_disk_push_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the disk group to ``parser``."""
    group = parser.add_argument_group("weights over a disk", "Pushes of weights through files.")
    group.add_argument(
        "--update-weight-mode",
        choices=["full", "delta"],
        default="full",
        help="Push all weights, or only changed bytes.",
    )
    group.add_argument(
        "--update-weight-transport", choices=["nccl", "disk"], default="nccl", help="How weights get to the engines."
    )
    group.add_argument(
        "--release-train", action="store_true", help="End the trainer's processes while engines generate."
    )
    group.add_argument(
        "--update-weight-disk-dir", type=file_path, metavar="DIR", help="Shared folder for versions of the weights."
    )
    group.add_argument(
        "--update-weight-disk-keep-files",
        action="store_true",
        help="Keep versions after every engine has loaded them.",
    )
    group.add_argument(
        "--update-weight-local-checkpoint-dir",
        type=file_path,
        metavar="DIR",
        help="Folder on each engine's host for the copy of the model that deltas are applied to.",
    )
    group.add_argument(
        "--update-weight-delta-encoding",
        choices=["xor", "overwrite"],
        default="xor",
        help="Encoding of changed bytes.",
    )
    group.add_argument(
        "--update-weight-delta-checksum",
        choices=["xxh3-128", "blake3", "adler32"],
        default="xxh3-128",
        help="Checksum that verifies the weights after a delta is applied.",
    )


def check_idle_flags(args: Namespace) -> Iterator[str]:
    """Yield a message for each flag of changes where none are sent."""
    for name, default in (("encoding", "xor"), ("checksum", "xxh3-128")):
        value = getattr(args, f"update_weight_delta_{name}")
        if value != default and args.update_weight_mode != "delta":
            yield f"--update-weight-delta-{name} is {value}, which has no effect without --update-weight-mode delta."


def check_delta_checksum(args: Namespace) -> Iterator[str]:
    """Yield a message for a checksum of deltas whose package is missing."""
    if args.update_weight_mode == "delta":
        from slime.ext.disk_push.delta import new_checksum

        try:
            new_checksum(args.update_weight_delta_checksum)
        except ConfigError as error:
            yield f"{error}."


def derive_released_trainer(args: Namespace) -> None:
    """Save and push after every rollout where the trainer ends; it leaves its GPUs to the engines."""
    if not args.release_train:
        return
    args.save_interval = args.update_weights_interval = 1
    if args.colocate:
        args.offload_train, args.offload_rollout = False, True


def check_disk_push(args: Namespace) -> Iterator[str]:
    """Yield one message for each setting of pushes over a disk that cannot work."""
    if args.update_weight_mode == "delta":
        yield from _delta(args)
    if args.update_weight_transport == "disk":
        yield from _disk(args)
    else:
        yield from _no_disk(args)
    if args.release_train:
        yield from _release(args)


def _delta(args: Namespace) -> Iterator[str]:
    if args.update_weight_transport != "disk":
        yield (
            f"--update-weight-mode delta travels over disk only, and --update-weight-transport is "
            f"{args.update_weight_transport}; add --update-weight-transport disk and --update-weight-disk-dir."
        )
    if args.colocate:
        yield (
            "--update-weight-mode delta and --colocate exclude each other: colocated engines read the trainer's "
            "memory, which is faster. Drop --update-weight-mode."
        )
    if args.eval_in_background:
        yield (
            "--eval-in-background gives its engines weights when an evaluation begins, and --update-weight-mode "
            "delta sends differences to the push before, which they do not have; use full."
        )
    if args.update_weight_local_checkpoint_dir is None:
        yield (
            "--update-weight-mode delta changes a copy of the checkpoint on each engine's host; name its folder: "
            "--update-weight-local-checkpoint-dir, a folder on a disk of that host with room for the model."
        )


def _disk(args: Namespace) -> Iterator[str]:
    if vars(args).get("weight_push") != "verified":
        yield "--weight-push plain sends weights through memory and broadcasts; drop --update-weight-transport disk."
    if not args.push_sends_model:
        yield "--update-weight-transport disk does not go with --lora-push adapter, by which engines get nothing else."
    if args.update_weight_disk_dir is None:
        yield (
            "--update-weight-transport disk needs --update-weight-disk-dir, a folder that trainer and engines share, "
            "with room for two versions of the model."
        )
        return
    shared = Path(args.update_weight_disk_dir).resolve()
    others = {
        "--hf-checkpoint": args.hf_checkpoint,
        "--save": args.save,
        "--update-weight-local-checkpoint-dir": args.update_weight_local_checkpoint_dir,
    }
    for flag, path in others.items():
        if path is not None and Path(path).resolve() == shared:
            yield f"--update-weight-disk-dir and {flag} are both {path}; give the versions a folder of their own."


def _no_disk(args: Namespace) -> Iterator[str]:
    for name in (
        "update_weight_disk_dir",
        "update_weight_disk_keep_files",
        "update_weight_local_checkpoint_dir",
        "custom_update_weight_post_write_path",
        "sglang_custom_pull_weights_pre_read_hook",
    ):
        if (value := getattr(args, name)) not in (None, False):
            shown = "" if value is True else f" is {value}, which"
            yield (
                f"{flag_of(name)}{shown} has no effect unless weights travel over disk: add "
                "--update-weight-transport disk, or drop the flag."
            )


def _release(args: Namespace) -> Iterator[str]:
    if args.update_weight_transport != "disk" or args.update_weight_mode != "full":
        yield (
            f"--release-train ends the trainer before the engines have its weights, so full weights must be on disk; "
            f"--update-weight-transport is {args.update_weight_transport} and --update-weight-mode is "
            f"{args.update_weight_mode}. Use disk and full."
        )
    if args.save is None:
        yield "--release-train restarts the trainer from its own checkpoints; name their folder: --save."
    if args.use_critic:
        yield "--release-train restarts the actor only; --advantage-estimator ppo has a critic. Drop one of them."
    if args.ref_update_interval is not None:
        yield "--release-train starts each time from --ref-load, so --ref-update-interval has no effect; drop it."
    if args.state_copy_interval is not None:
        yield "--trainer-recovery memory: --release-train saves every rollout, and its ranks end; use checkpoint."
    if args.spare_nodes:
        yield f"--spare-nodes {args.spare_nodes}: --release-train takes other GPUs for each rollout; drop one of them."
    if args.keep_old_actor:
        yield "--release-train ends the process that holds the weights of --keep-old-actor; drop one of them."


GROUP = FlagGroup(
    add_disk_push_arguments,
    derive=(derive_released_trainer,),
    check=(check_disk_push, check_idle_flags, check_delta_checksum),
)
