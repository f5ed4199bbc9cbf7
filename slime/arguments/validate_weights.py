"""Checks of the flags that say how weights reach the engines."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slime.utils.errors import ConfigError
from slime.weights.checksums import new_checksum


def check_weight_flags(args: Namespace) -> Iterator[str]:
    """One message for each thing that cannot work."""
    if args.update_weight_mode == "delta":
        yield from _delta(args)
    for name, default in (("encoding", "xor"), ("checksum", "xxh3-128")):
        value = getattr(args, f"update_weight_delta_{name}")
        if value != default and args.update_weight_mode != "delta":
            yield f"--update-weight-delta-{name} is {value}, which has no effect without --update-weight-mode delta."
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
            "--weight-push-failure refill starts engines again, which only --use-fault-tolerance does; add that flag, "
            "or say drop or stop."
        )
    if args.rollout_external:
        yield (
            "--weight-push-failure refill starts engines again, and those of --rollout-external-engine-addrs are not "
            "ours to start; say drop or stop."
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
            "memory, which no delta can beat. Drop --update-weight-mode."
        )
    if args.update_weight_local_checkpoint_dir is None:
        yield (
            "--update-weight-mode delta changes a copy of the checkpoint on each engine's host; say where it lies: "
            "--update-weight-local-checkpoint-dir, a folder on a disk of that host with room for the model."
        )
    try:
        new_checksum(args.update_weight_delta_checksum)
    except ConfigError as error:
        yield f"{error}."


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
            f"--release-train ends the trainer before the engines have its weights, so these must lie on disk, whole; "
            f"--update-weight-transport is {args.update_weight_transport} and --update-weight-mode is "
            f"{args.update_weight_mode}. Use disk and full."
        )
    if args.save is None:
        yield "--release-train starts the trainer anew from its own checkpoints; say where they go: --save."
    if args.use_critic:
        yield "--release-train restarts the actor only; --advantage-estimator ppo has a critic. Drop one of them."
    if args.ref_update_interval is not None:
        yield "--release-train starts each time from --ref-load, so --ref-update-interval has no effect; drop it."
    if args.keep_old_actor:
        yield "--release-train forgets what --keep-old-actor would keep in the trainer's memory; drop one of them."
