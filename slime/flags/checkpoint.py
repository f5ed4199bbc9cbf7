"""Checkpoints: where weights come from and go to, from which of them a run starts, and what a folder holds.

Folders are told apart by their files alone; nothing is loaded.  Beside the checkpoints of ``--save`` lies the last
weight version of the run, from which the same command counts on: counted from the rollout alone, a push that was
repeated would leave samples in the ledger whose version comes again for other weights, and which look younger than
they are (``--max-staleness``).
"""

from __future__ import annotations

import argparse
import json
import logging
import re
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime.flags.kinds import file_path, non_negative_int, positive_int
from slime.utils.errors import ConfigError, DataError
from slime.utils.files import (
    MAX_TEXT_BYTES,
    check_inside,
    read_model_config,
    read_object,
    read_outside_file,
    write_atomically,
)

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
"""Written last by a save: its presence means that the save it names is complete."""
VERSION_REMEDY = "Remove it to count versions from the rollout."
LFS_NOTE = b"version https://git-lfs"
"""Beginning of the pointer that git-lfs leaves in place of a large file."""
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "preprocessor_config.json")
"""Files beside config.json that transformers reads later."""
WEIGHT_SUFFIXES = (".safetensors", ".bin")
READ_SUFFIXES = (".json", ".txt", ".model", ".jinja", *WEIGHT_SUFFIXES)
MAX_TRACKER_BYTES = 4096
"""Of a file that names an iteration."""


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoints group to ``parser``."""
    group = parser.add_argument_group("checkpoints", "Sources of the initial weights, and saves.")
    group.add_argument(
        "--model-name",
        help="Model type that decides the names of exported weights. Default: that of --hf-checkpoint's config.json.",
    )
    group.add_argument(
        "--hf-checkpoint",
        type=file_path,
        metavar="DIR",
        help="Hugging Face folder, or the model's name on the hub: config, tokenizer, and the weights and "
        "quantization that the engines start with.",
    )
    group.add_argument(
        "--ref-load",
        type=file_path,
        metavar="DIR",
        help="Checkpoint of the reference model (Megatron or Hugging Face); the actor also starts from it when "
        "--load is empty. Default: --hf-checkpoint, unless --load begins with other weights.",
    )
    group.add_argument(
        "--ref-ckpt-step",
        type=non_negative_int,
        help="Iteration of the reference model's checkpoint. Default: the latest.",
    )
    group.add_argument(
        "--load",
        type=file_path,
        metavar="DIR",
        help="Checkpoint of the actor. Without a finished save in it, training starts from --ref-load.",
    )
    group.add_argument(
        "--save", type=file_path, metavar="DIR", help="Folder for checkpoints, the position in the data, and metrics."
    )
    group.add_argument("--save-interval", type=positive_int, help="Save every so many rollouts.")
    group.add_argument(
        "--async-save", action="store_true", help="Write checkpoints in the background while training continues."
    )
    group.add_argument(
        "--no-verify-checkpoint",
        dest="verify_checkpoint",
        action="store_false",
        help="Load weights without comparing them with the digests that lie beside them (digests.json).",
    )
    group.add_argument(
        "--keep-last",
        type=positive_int,
        default=None,
        metavar="N",
        help="Remove older checkpoints when a save counts: the newest N stay. Default: all stay.",
    )
    group.add_argument("--no-save-optim", action="store_true", default=False, help="Save no optimizer state.")
    group.add_argument(
        "--save-hf",
        type=file_path,
        metavar="TEMPLATE",
        help="Folder for a Hugging Face export with each save; {rollout_id} in it is replaced. hub:ORG/NAME: a "
        "repository that gets each of them as a commit.",
    )


def derive_starting_point(args: Namespace) -> None:
    """Go on from --load when a run saved there; else start anew, from a converted model there or the reference.

    The reference is --hf-checkpoint unless --ref-load names one, or --load other weights to begin with.
    """
    args.earlier_load = None  # --load of a run that went on, once its trainer goes on from --save
    is_file = args.load is not None and Path(args.load).is_file()  # left for the check to name
    is_model = is_huggingface_folder(args.load) or is_release(args.load) or is_file
    if args.ref_load is None and not is_model:
        args.ref_load = args.hf_checkpoint
    if has_finished_save(args.load) and not is_release(args.load):
        return
    args.no_load_optim = True
    args.no_load_rng = True
    args.finetune = True
    if not is_model:
        args.load = args.ref_load
        if args.ref_ckpt_step is not None:
            args.ckpt_step = args.ref_ckpt_step
    if args.start_rollout_id is None:
        args.start_rollout_id = 0


def advise_saves(args: Namespace) -> None:
    """Log a folder for checkpoints that stays empty."""
    if args.save is not None and args.save_interval is None and not args.debug_rollout_only:
        logger.warning("--save is given without --save-interval: no checkpoint will be written.")


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder that training can start from."""

    kind: Literal["megatron", "huggingface"]
    iteration: int | Literal["release"] | None
    """Iteration that the tracker names; None for a Hugging Face folder."""
    folder: Path
    """Of the files."""


def has_finished_save(folder: str | None) -> bool:
    """Return True when a Megatron save was completed in ``folder``."""
    return folder is not None and ((Path(folder) / TRACKER).is_file() or is_iteration_folder(folder))


def is_release(folder: str | None) -> bool:
    """Return True when ``folder`` holds a converted model, which no run has trained yet."""
    if folder is None:
        return False
    tracker = Path(folder) / TRACKER
    return Path(folder).name == "release" or (
        tracker.is_file() and read_outside_file(tracker, max_bytes=MAX_TRACKER_BYTES).strip() == b"release"
    )


def is_iteration_folder(folder: str) -> bool:
    """Return True for the folder of one save, as in ``.../iter_0000020``."""
    return re.fullmatch(r"iter_\d{7}", Path(folder).name) is not None and Path(folder).is_dir()


def is_huggingface_folder(folder: str | None) -> bool:
    """Return True when ``folder`` holds a Hugging Face model.

    A run that has ended before its first save leaves a config.json, too: of its record, with its events beside it.
    """
    files = "config.json", "events.jsonl"
    return folder is not None and [(Path(folder) / name).is_file() for name in files] == [True, False]


def inspect_checkpoint(
    folder: str | None, flag: str, step: int | None = None, *, step_flag: str = "--ckpt-step"
) -> CheckpointFolder:
    """Return what ``folder`` holds.

    Args:
        folder: the value of ``flag``; None where it is not given.
        flag: named in errors.
        step: the iteration wanted; None takes the tracker's.
        step_flag: the flag of ``step``, named in errors.

    Raises:
        ConfigError: the flag is not given, the folder is missing, holds no checkpoint, or the save that is wanted is
            not whole.
        DataError: ``folder`` is a save that is not whole.
    """
    if folder is None:
        raise ConfigError(f"{flag} is not given. Name a Megatron or a Hugging Face checkpoint.")
    path = Path(folder)
    if path.is_file():
        raise ConfigError(f"{flag}: {folder} is a file; give the folder of a Megatron or a Hugging Face checkpoint.")
    if not path.is_dir():
        raise ConfigError(f"{flag}: {folder} is not a folder. Give a Megatron or a Hugging Face checkpoint.")
    if is_iteration_folder(folder):
        if not (path / "metadata.json").is_file():
            raise DataError(f"{flag}: {folder} is an incomplete checkpoint, without metadata.json. Give another one.")
        return CheckpointFolder("megatron", int(path.name.removeprefix("iter_")), path)
    if path.name == "release" and (path / "metadata.json").is_file():
        return CheckpointFolder("megatron", "release", path)
    if (path / TRACKER).is_file() or (step is not None and (path / f"iter_{step:07d}").is_dir()):
        wanted = read_tracker(path / TRACKER, flag) if step is None else step
        name = "release" if wanted == "release" else f"iter_{wanted:07d}"
        if not (path / name / "metadata.json").is_file():
            saves = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir())) or "none"
            raise ConfigError(
                f"{flag}: {folder} has no checkpoint {name}, or it is incomplete; saves there: {saves}. "
                + ("Repair the folder or give another one." if step is None else f"Choose one of those: {step_flag}.")
            )
        return CheckpointFolder("megatron", wanted, path / name)
    if is_huggingface_folder(folder):
        check_huggingface_folder(folder, flag)
        return CheckpointFolder("huggingface", None, path)
    raise ConfigError(
        f"{flag}: {folder} holds neither a Megatron checkpoint ({TRACKER}) nor a Hugging Face model (config.json). "
        "Convert a model with tools/convert_hf_to_torch_dist.py, or correct the path."
    )


def read_tracker(file: Path, flag: str) -> int | Literal["release"]:
    """Return the iteration that a tracker file names.

    Raises:
        ConfigError: it holds neither a number nor the word release.
    """
    try:
        text = read_outside_file(file, max_bytes=MAX_TRACKER_BYTES).decode(errors="replace").strip()
    except DataError as error:
        raise ConfigError(f"{flag}: {error}") from error
    if text == "release":
        return "release"
    if not re.fullmatch("[0-9]{1,9}", text):  # str.isdigit also takes digits that int() does not
        raise ConfigError(
            f"{flag}: {file} says {text[:40]!r}; an iteration or the word release is needed. "
            "Write the number of a checkpoint beside it, or choose one with --ckpt-step."
        )
    return int(text)


def check_huggingface_folder(folder: str, flag: str, *, weights: bool = True) -> dict[str, Any]:
    """Return the config of a Hugging Face folder whose files are all there.

    Args:
        folder: the value of ``flag``.
        flag: named in errors.
        weights: also look for the weight files; without, config and tokenizer suffice.

    Raises:
        ConfigError: a file is missing or malformed.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(
            f"{flag}: {folder} is not a folder. Download the model first: hf download NAME --local-dir DIR."
        )
    if not (path / "config.json").is_file() and (path / TRACKER).is_file():
        raise ConfigError(
            f"{flag}: {folder} has no config.json; it is a Megatron checkpoint, which --ref-load and --load take. "
            "Give the Hugging Face folder that it was converted from."
        )
    if not (path / "config.json").is_file() and (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"{flag}: {folder} holds an adapter (adapter_config.json), not a model; merge it into its base model "
            "first."
        )
    _check_are_files(path, flag)
    config = read_model_config(path, flag=flag)
    for name in SETTINGS:
        if (path / name).is_file():
            read_object(path / name, flag=flag, error=ConfigError)
    if weights:
        _check_weight_files(path, flag)
    return config


def _check_are_files(path: Path, flag: str) -> None:
    """Refuse links out of the folder, pipes and devices among what transformers opens by itself."""
    for file in sorted(file for file in path.iterdir() if file.suffix in READ_SUFFIXES and not file.is_dir()):
        try:
            check_inside(file)
        except DataError as error:
            raise ConfigError(f"{flag}: {error}") from error
        if file.exists() and not file.is_file():
            raise ConfigError(f"{flag}: {file} is a pipe or a device, not a file; download the model again.")
        if file.suffix not in WEIGHT_SUFFIXES and file.exists() and file.stat().st_size > MAX_TEXT_BYTES:
            raise ConfigError(
                f"{flag}: {file} has {file.stat().st_size} bytes, and at most {MAX_TEXT_BYTES} are read."
            )


def _check_weight_files(path: Path, flag: str) -> None:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_object(index, flag=flag, error=ConfigError).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{flag}: {index} has no weight_map; download the model again.")
        if wrong := [file for file in weight_map.values() if not isinstance(file, str) or Path(file).name != file]:
            raise ConfigError(
                f"{flag}: {index} names {str(wrong[0])[:80]!r}, which is no file beside it; download the model again."
            )
        missing = sorted({name for name in weight_map.values() if not (path / name).is_file()})
        if missing:
            raise ConfigError(
                f"{flag}: {path} lacks {len(missing)} weight files that its index names, {missing[0]} first; "
                "download the model again."
            )
    elif not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise ConfigError(
            f"{flag}: {path} has a config but no weight files (*.safetensors); download the model again."
        )
    _check_fetched([*sorted(path.glob("*.safetensors"))[:1], *path.glob("tokenizer.json")], flag)


def _check_fetched(files: Iterable[Path], flag: str) -> None:
    """Refuse the notes of three lines that a clone without git-lfs has in the place of large files."""
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{flag}: {file} is a folder or a device, not a file; download the model again.")
        with file.open("rb") as content:
            is_note = content.read(len(LFS_NOTE)) == LFS_NOTE
        if is_note:
            raise ConfigError(
                f"{flag}: {file} is a git-lfs pointer, not the file itself; run git lfs pull in {file.parent}, or "
                "download the model with hf download."
            )


def _version_path(folder: str) -> Path:
    return Path(folder) / "rollout" / "weight_version.json"


def version_before(args: Namespace, start_rollout_id: int) -> int:
    """Return the version from which a trainer that goes on with ``start_rollout_id`` counts its pushes.

    Raises:
        DataError: the file of ``--load`` or ``--save`` is damaged.
    """
    version = max(start_rollout_id, args.update_weight_start_version)
    for path in {_version_path(folder) for folder in (args.load, args.save) if folder is not None}:
        if not path.is_file():
            continue
        told = read_object(path, remedy=VERSION_REMEDY)
        last, rollout_id = told.get("version"), told.get("rollout")
        if not isinstance(last, int) or not isinstance(rollout_id, int):
            raise DataError(
                f"{path} says version {last!r} of rollout {rollout_id!r}; both must be numbers. {VERSION_REMEDY}"
            )
        # The weights after the same rollout are the same, and keep their version.
        version = max(version, last - (rollout_id == start_rollout_id - 1))
    return version


class VersionCount:
    """The versions of a run as its driver counts them: at least as high as its trainer's."""

    number = 0
    """Of the last push."""
    rollout_id = -1
    """The last rollout that the weights were trained on."""

    def start(self, args: Namespace, start_rollout_id: int) -> None:
        """Count on as a trainer that goes on with ``start_rollout_id``."""
        self.number, self.rollout_id = version_before(args, start_rollout_id), start_rollout_id - 1

    def count(self, folder: str | None) -> None:
        """Count a push, before any engine gets its version; ``folder``: of ``--save``."""
        self.number += 1
        if folder is not None:
            content = json.dumps({"version": self.number, "rollout": self.rollout_id}).encode()
            write_atomically(_version_path(folder), lambda file: file.write(content), what="The weight version")
