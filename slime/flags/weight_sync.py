"""Weight updates: how new weights go from the trainer to the engines."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slime.flags.group import FlagGroup
from slime.flags.kinds import byte_count, file_path, positive_int


def add_weight_sync_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the weight update group to ``parser``."""
    group = parser.add_argument_group("weight update", "Pushes of weights to the engines.")
    group.add_argument(
        "--update-weight-mode",
        choices=["full", "delta"],
        default="full",
        help="Push all weights, or only changed bytes.",
    )
    group.add_argument(
        "--update-weight-transport", choices=["nccl", "disk"], default="nccl", help="How weights get to the engines."
    )
    group.add_argument("--update-weight-buffer-size", type=byte_count, default=512 * 1024**2, help="Bytes per bucket.")
    group.add_argument(
        "--update-weights-interval", type=positive_int, default=1, help="Rollouts between two pushes (train_async.py)."
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
        "--weight-push-failure",
        choices=["refill", "drop", "stop"],
        help="What happens to an engine that fails a push: refill restarts it with the new weights, drop excludes it "
        "from then on, stop ends the run. Default: refill with --use-fault-tolerance, else stop.",
    )
    group.add_argument(
        "--check-weight-update-equal",
        action="store_true",
        help="Compare the engines' weights with the trainer's after each push; a difference ends the run.",
    )


def derive_weight_sync(args: Namespace) -> None:
    """Restart an engine that fails a push, where engines are restarted; push each rollout that ends the trainer."""
    if args.weight_push_failure is None:
        refills = args.use_fault_tolerance and not args.rollout_external
        args.weight_push_failure = "refill" if refills else "stop"
    args.update_weight_start_version = 0
    if args.release_train:
        args.update_weights_interval = 1
        if args.save_interval is None:
            args.save_interval = 1


def check_weight_flags(args: Namespace) -> Iterator[str]:
    """Yield one message for each setting of weight updates that cannot work."""
    if args.update_weight_mode == "delta":
        yield from _delta(args)
    if args.update_weight_transport == "disk":
        yield from _disk(args)
    else:
        yield from _no_disk(args)
    if args.release_train:
        yield from _release(args)
    if args.weight_push_failure == "refill":
        yield from _refill(args)


def _refill(args: Namespace) -> Iterator[str]:
    if not args.use_fault_tolerance:
        yield (
            "--weight-push-failure refill restarts engines, which needs --use-fault-tolerance; add that flag, or "
            "use drop or stop."
        )
    if args.rollout_external:
        yield (
            "--weight-push-failure refill restarts engines, but slime does not start those of "
            "--rollout-external-engine-addrs; use drop or stop."
        )


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
    if args.update_weight_local_checkpoint_dir is None:
        yield (
            "--update-weight-mode delta changes a copy of the checkpoint on each engine's host; name its folder: "
            "--update-weight-local-checkpoint-dir, a folder on a disk of that host with room for the model."
        )


def _disk(args: Namespace) -> Iterator[str]:
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
                f"--{name.replace('_', '-')}{shown} has no effect unless weights travel over disk: add "
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
    if args.keep_old_actor:
        yield "--release-train ends the process that holds the weights of --keep-old-actor; drop one of them."


GROUP = FlagGroup(add_weight_sync_arguments, derive=(derive_weight_sync,), check=(check_weight_flags,))
