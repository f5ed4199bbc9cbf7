"""A hook between writing a version of the weights and reading it.

    --custom-update-weight-post-write-path examples.delta_weight_sync.post_write.announce

Every trainer rank calls it when the version's folder is complete and before any engine reads it.  If trainer and
engines share no disk, this is the place to copy the folder (to an object store, with rsync, ...).  This example only
logs what would have been copied, to ``SAVE/versions.jsonl`` or the file ``delta_log`` (``--custom-config-path``).
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist


def announce(args: Namespace, version_dir: str, rollout_engines: Sequence[Any]) -> None:
    """Log the version's name, files and bytes on rank 0; a hook that copies files would run on all ranks."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    folder = Path(version_dir)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    line = {
        "version": folder.name,
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "engines": len(rollout_engines),
    }
    log = Path(getattr(args, "delta_log", None) or Path(args.save) / "versions.jsonl")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())
