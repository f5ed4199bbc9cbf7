"""A hook between writing a version of the weights and reading it.

    --custom-update-weight-post-write-path examples.delta_weight_sync.post_write.announce

It is called on every trainer rank, when the version's folder is complete and before any engine looks for it.  Where
trainer and engines share no disk this is the place to carry the folder over (to an object store, by rsync, ...); here
it notes what there would have been to carry.  ``delta_log`` (``--custom-config-path``) is another file for the notes.
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
    """Write a line about the version: its name, files and bytes.  One rank does it; carrying would be for all."""
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
