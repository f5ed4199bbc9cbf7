"""Shared memory of SGLang's that outlives its processes.

SGLang unlinks it when its processes end in order; a process that is killed leaves 16 KiB of load figures, and
24 MiB of a queue for each engine of several GPUs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

FOLDER = Path("/dev/shm")
PATTERNS = ("sglang_loads_*.shm", "sgl_shm_mq_*")
"""Its names in SGLang 0.5.15 (load_snapshot.py and shm_broadcast.py there)."""
YOUNG_S = 60.0
"""Age up to which a process that is to use it, of another container even, may not have mapped it yet."""


def remove_segments(folder: Path = FOLDER) -> list[Path]:
    """Remove this user's segments of engines that have ended, those that no process has mapped; return them."""
    found = [path for pattern in PATTERNS for path in folder.glob(pattern) if _is_old_and_ours(path)]
    if not found:
        return []
    mapped = _mapped_below(folder)
    removed = [path for path in found if str(path) not in mapped]
    for path in removed:
        path.unlink(missing_ok=True)
    return removed


def _is_old_and_ours(path: Path) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > YOUNG_S


def _mapped_below(folder: Path) -> set[str]:
    """Return the files below ``folder`` that this user's processes have mapped."""
    mapped: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:  # it has ended, or is another user's
            continue
        prefix = f"{folder}/"
        mapped |= {line[line.index(prefix) :] for line in lines if prefix in line}
    return mapped
