"""Flags of weight pushes over a shared disk."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slime.flags.group import FlagGroup
from slime.flags.kinds import file_path
from slime.utils.errors import ConfigError


def add_disk_push_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the disk group to ``parser``."""
    group = parser.add_argument_group("weights over a disk", "Weight pushes through files.")
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


def check_delta_checksum(args: Namespace) -> Iterator[str]:
    """Yield a message if the package of the delta checksum is missing."""
    if args.update_weight_mode == "delta":
        from slime.ext.fast_push.disk.delta import new_checksum

        try:
            new_checksum(args.update_weight_delta_checksum)
        except ConfigError as error:
            yield f"{error}."


def derive_released_trainer(args: Namespace) -> None:
    """Set what ``--release-train`` implies: save and push after every rollout; if colocated, offload engines only."""
    if not args.release_train:
        return
    args.save_interval = args.update_weights_interval = 1
    if args.colocate:
        args.offload_train, args.offload_rollout = False, True


def check_disk_push(args: Namespace) -> Iterator[str]:
    """Yield one message for each disk-push setting that cannot work."""
    if args.release_train and args.use_critic:
        yield "--release-train restarts the actor only; --advantage-estimator ppo has a critic. Drop one of them."
    if args.update_weight_transport != "disk":
        return
    if not args.push_sends_model:
        yield "--update-weight-transport disk does not go with --lora-push adapter, which sends engines adapters only."
    if args.update_weight_disk_dir is None:
        return
    shared = Path(args.update_weight_disk_dir).resolve()
    others = {
        "--hf-checkpoint": args.hf_checkpoint,
        "--save": args.save,
        "--update-weight-local-checkpoint-dir": args.update_weight_local_checkpoint_dir,
    }
    for flag, path in others.items():
        if path is not None and Path(path).resolve() == shared:
            yield f"--update-weight-disk-dir and {flag} are both {path}; give the versions another folder."


_OF_DISK = (
    *("update_weight_mode=delta", "update_weight_disk_dir", "update_weight_disk_keep_files", "release_train"),
    *("update_weight_local_checkpoint_dir", "custom_update_weight_post_write_path"),
    "sglang_custom_pull_weights_pre_read_hook",
)
_OF_DELTAS = (
    *("update_weight_delta_encoding=overwrite", "update_weight_delta_checksum=blake3"),
    "update_weight_delta_checksum=adler32",
)
GROUP = FlagGroup(
    add_disk_push_arguments,
    derive=(derive_released_trainer,),
    check=(check_disk_push, check_delta_checksum),
    needs=(
        *((name, "update_weight_transport=disk", "it applies to weight pushes over a disk") for name in _OF_DISK),
        *((name, "update_weight_mode=delta", "it applies to delta pushes") for name in _OF_DELTAS),
        ("update_weight_mode=delta", "update_weight_local_checkpoint_dir",
         "deltas are applied to a copy of the checkpoint on each engine's host, on a disk with room for the model"),
        ("update_weight_transport=disk", "weight_push=verified", "a plain push has no files"),
        ("update_weight_transport=disk", "update_weight_disk_dir",
         "trainer and engines share that folder, with room for two versions of the model"),
        ("release_train", "update_weight_mode=full", "the trainer ends before the engines have its weights"),
        ("release_train", "save", "the trainer restarts from its own checkpoints"),
    ),
    excludes=(
        ("update_weight_mode=delta", "colocate", "colocated engines read the trainer's memory, which is faster"),
        ("update_weight_mode=delta", "eval_in_background",
         "evaluation engines lack the previous version, which deltas are relative to; use full"),
        ("release_train", "ref_update_interval", "each start loads the reference from --ref-load"),
        ("release_train", "trainer_recovery=memory", "its ranks end, and save every rollout; use checkpoint"),
        ("release_train", "spare_nodes", "each rollout takes other GPUs"),
        ("release_train", "keep_old_actor", "the process that holds the old weights ends"),
    ),
)  # fmt: skip
