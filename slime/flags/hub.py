"""Names on the Hugging Face hub in place of folders and files: ``Qwen/Qwen3-0.6B``, ``openai/gsm8k/main@train``.

Cached repositories are used without a network (``HF_HUB_OFFLINE=1``).  A value is a hub name only if no such local
folder or file exists.
"""

from __future__ import annotations

import logging
import os
import re
from argparse import Namespace
from pathlib import Path

from slime.flags.group import flag_of
from slime.utils.errors import ConfigError, DataError, SlimeError

logger = logging.getLogger(__name__)

_MODEL = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_DATA = re.compile(
    r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(/(?P<config>[\w.-]+))?(@(?P<split>\w[\w.-]*))?(?P<rows>@\[.*\])?"
)
_FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".yaml", ".yml", ".gz", ".bz2", ".xz", ".zst", ".zip")
_NO_WEIGHTS_OF_OURS = ("*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "original/*")


def derive_hub_names(args: Namespace) -> None:
    """Replace hub names by local folders and files."""
    if not args.runs_here:
        return
    for flag in ("hf_checkpoint", "ref_load"):
        folder = vars(args)[flag]
        if folder is not None and _MODEL.fullmatch(folder) and not Path(folder).exists():
            setattr(args, flag, str(fetch(folder, "model", flag_of(flag), ConfigError)))
    if args.prompt_data is not None:
        args.prompt_data = data_file(args.prompt_data, "--prompt-data")


def data_file(path: str, flag: str) -> str:
    """Return the local file of a hub data set ``NAME[/CONFIG][@SPLIT][@[a:b]]``; any other path with ``~`` expanded.

    Raises:
        DataError: neither the cache nor the hub has it, or it has several configs and none is named.
    """
    path = os.path.expanduser(path)
    match = _DATA.fullmatch(path)
    if match is None or Path(path).exists() or path.partition("@")[0].endswith(_FILES):
        return path
    folder = fetch(match["name"], "dataset", flag, DataError)
    config, split = match["config"], match["split"] or "train"
    import datasets

    name = f"{match['name'].replace('/', '--')}-{config or 'default'}-{split}-{folder.name}.parquet"
    file = Path(datasets.config.HF_DATASETS_CACHE) / "slime" / name
    if not file.is_file():
        try:
            rows = datasets.load_dataset(str(folder), config, split=split)
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            said = _first_line(error).partition(" Example of usage:")[0]  # it would name the folder in the cache
            raise DataError(
                f"{flag} {path}: {said} Write NAME/CONFIG@SPLIT, such as openai/gsm8k/main@train."
            ) from None
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        rows.to_parquet(unfinished)
        unfinished.rename(file)
    logger.info("%s %s is %s", flag, path, file)
    return f"{file}{match['rows'] or ''}"


def fetch(name: str, kind: str, flag: str, error_type: type[SlimeError]) -> Path:
    """Return the local folder of a hub repository, from the cache or the network.

    Raises:
        SlimeError: an ``error_type``, if neither has it.
    """
    import httpx
    from huggingface_hub import constants, snapshot_download

    try:
        folder = snapshot_download(name, repo_type=kind, ignore_patterns=list(_NO_WEIGHTS_OF_OURS))
    except (OSError, ValueError, httpx.HTTPError) as error:
        option = "--repo-type dataset " if kind == "dataset" else ""
        raise error_type(
            f"{flag}: {name} is not here, and the cache {constants.HF_HUB_CACHE} has no {kind} of that name "
            f"({type(error).__name__}). Where the hub can be reached, fetch it: hf download {option}{name}"
        ) from error
    logger.info("%s %s is %s", flag, name, folder)
    return Path(folder)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
