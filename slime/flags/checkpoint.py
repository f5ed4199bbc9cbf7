"""Checkpoints: the folders that weights are loaded from and saved to, a run's starting point, and a folder's content.

Folders are recognized by their files alone; nothing is loaded.  ``--save`` also holds the last weight version of the
run, from which a resumed run continues.  If versions were counted from the rollout alone, repeated pushes would reuse
versions of samples in the ledger for other weights, and these samples would look younger than they are
(``--max-staleness``).
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
    similar_path,
    write_atomically,
)

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
"""Tracker file, written last by a save: the save that it names is complete."""
VERSION_REMEDY = "Remove it to count versions from the rollout."
LFS_NOTE = b"version https://git-lfs"
"""Start of the pointer file that git-lfs leaves in place of a large file."""
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "preprocessor_config.json")
"""Files next to config.json that transformers reads later."""
WEIGHT_SUFFIXES = (".safetensors", ".bin")
READ_SUFFIXES = (".json", ".txt", ".model", ".jinja", *WEIGHT_SUFFIXES)
MAX_TRACKER_BYTES = 4096
"""Size limit of a tracker file."""


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoints group to ``parser``."""
    group = parser.add_argument_group("checkpoints", "Sources of the initial weights, and saves.")
    group.add_argument(
        "--model-name",
        help="Model type that determines the names of exported weights. Default: that of --hf-checkpoint's "
        "config.json.",
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
        help="Checkpoint of the reference model (Megatron or Hugging Face). The actor also starts from it if --load "
        "has no save. Default: --hf-checkpoint, unless --load holds other initial weights.",
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
    group.add_argument("--save-interval", type=positive_int, help="Save every this many rollouts.")
    group.add_argument(
        "--async-save", action="store_true", help="Write checkpoints in the background while training continues."
    )
    group.add_argument(
        "--no-verify-checkpoint",
        dest="verify_checkpoint",
        action="store_false",
        help="Load weights without verifying them against their digests (digests.json).",
    )
    group.add_argument(
        "--keep-last",
        type=positive_int,
        default=None,
        metavar="N",
        help="Keep only the newest N checkpoints, and those that hold the reference of one of them "
        "(--ref-update-interval); others are removed after each complete save. Default: keep all.",
    )
    group.add_argument("--no-save-optim", action="store_true", default=False, help="Save no optimizer state.")
    group.add_argument(
        "--save-hf",
        type=file_path,
        metavar="TEMPLATE",
        help="Folder for a Hugging Face export with each save; {rollout_id} is replaced. hub:ORG/NAME commits each "
        "export to that repository.",
    )


def derive_starting_point(args: Namespace) -> None:
    """Resume from --load if a run saved there; otherwise start from a converted model in --load, or the reference.

    The reference is --hf-checkpoint, unless --ref-load is given or --load holds other initial weights.
    """
    args.earlier_load = None  # --load of a resumed run, once its trainer continues from --save
    is_file = args.load is not None and Path(args.load).is_file()  # the check reports it
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
    """Log if the folder for checkpoints stays empty."""
    if args.save is not None and args.save_interval is None and not args.debug_rollout_only:
        logger.warning("--save is given without --save-interval: no checkpoint will be written.")


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder that training can start from."""

    kind: Literal["megatron", "huggingface"]
    iteration: int | Literal["release"] | None
    """Iteration to load; None for a Hugging Face folder."""
    folder: Path
    """Folder of the files."""


def has_finished_save(folder: str | None) -> bool:
    """Return True if ``folder`` has a complete Megatron save."""
    return folder is not None and ((Path(folder) / TRACKER).is_file() or is_iteration_folder(folder))


def is_release(folder: str | None) -> bool:
    """Return True if ``folder`` holds a converted model that no run has trained yet."""
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
    """Return True if ``folder`` holds a Hugging Face model.

    A run that ended before its first save also leaves a config.json: that of its record, next to its events.
    """
    files = "config.json", "events.jsonl"
    return folder is not None and [(Path(folder) / name).is_file() for name in files] == [True, False]


def inspect_checkpoint(
    folder: str | None, flag: str, step: int | None = None, *, step_flag: str = "--ckpt-step"
) -> CheckpointFolder:
    """Return the checkpoint in ``folder``.

    Args:
        folder: the value of ``flag``; None if it is not given.
        flag: named in errors.
        step: the iteration to load; None takes the tracker's.
        step_flag: the flag of ``step``, named in errors.

    Raises:
        ConfigError: the flag is not given; the folder is missing or has no checkpoint; or the requested save is
            incomplete.
        DataError: ``folder`` is itself a save that is incomplete.
    """
    if folder is None:
        raise ConfigError(f"{flag} is not given. Name a Megatron or a Hugging Face checkpoint.")
    path = Path(folder)
    if path.is_file():
        raise ConfigError(f"{flag}: {folder} is a file; give the folder of a Megatron or a Hugging Face checkpoint.")
    if not path.is_dir():
        raise ConfigError(
            f"{flag}: {folder} is not a folder. Give a Megatron or a Hugging Face checkpoint.{similar_path(path)}"
        )
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
    """Return the iteration in a tracker file.

    Raises:
        ConfigError: it contains neither a number nor the word release.
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
    """Check that a Hugging Face folder is complete, and return its config.

    Args:
        folder: the value of ``flag``.
        flag: named in errors.
        weights: also check the weight files; if False, config and tokenizer suffice.

    Raises:
        ConfigError: a file is missing or malformed.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(
            f"{flag}: {folder} is not a folder. Download the model first: hf download NAME --local-dir DIR."
            f"{similar_path(path)}"
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
    """Reject links out of the folder, pipes and devices among the files that transformers opens."""
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
    """Reject the three-line pointer files that a clone without git-lfs has in place of large files."""
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


def version_before(start_rollout_id: int, folders: Iterable[str | None], *, at_least: int) -> int:
    """Return the version from which a trainer that continues with ``start_rollout_id`` counts its pushes.

    Args:
        folders: ``--load`` and ``--save``, which may hold the last version of an earlier process.
        at_least: version of the last push of this job (``update_weight_start_version``).

    Raises:
        DataError: the file of ``--load`` or ``--save`` is damaged.
    """
    version = max(start_rollout_id, at_least)
    for path in {_version_path(folder) for folder in folders if folder is not None}:
        if not path.is_file():
            continue
        told = read_object(path, remedy=VERSION_REMEDY)
        last, rollout_id = told.get("version"), told.get("rollout")
        if not isinstance(last, int) or not isinstance(rollout_id, int):
            raise DataError(
                f"{path} says version {last!r} of rollout {rollout_id!r}; both must be numbers. {VERSION_REMEDY}"
            )
        # Weights after the same rollout are equal and keep their version.
        version = max(version, last - (rollout_id == start_rollout_id - 1))
    return version


class VersionCount:
    """The driver's count of weight versions, which is at least as high as the trainer's."""

    number = 0
    """Version of the last push."""
    rollout_id = -1
    """The last rollout that the weights were trained on."""

    def start(self, number: int, start_rollout_id: int) -> None:
        """Continue counting from ``number`` like a trainer that continues with ``start_rollout_id``."""
        self.number, self.rollout_id = number, start_rollout_id - 1

    def count(self, folder: str | None) -> None:
        """Count a push before any engine gets its version.  ``folder`` is ``--save``."""
        self.number += 1
        if folder is not None:
            content = json.dumps({"version": self.number, "rollout": self.rollout_id}).encode()
            write_atomically(_version_path(folder), lambda file: file.write(content), what="The weight version")
