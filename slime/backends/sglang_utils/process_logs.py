"""Where engines and routers write, and how long that is kept.

    $TMPDIR/slime-UID/run-YYYYMMDD-HHMMSS-PID/engine_0_10.0.0.1_21000.XXXX.log

A run is a rollout manager and what it starts, on every node.  The folders of the last ``KEEP_RUNS`` runs stay; older
ones are removed when a run begins.  ``SLIME_LOG_DIR`` names another folder, in which nothing is ever removed.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path

from slime.utils import env

logger = logging.getLogger(__name__)

KEEP_RUNS = 20
STILL_WRITING_S = 6 * 3600.0
"""A run that wrote so recently may still go on, however many began after it."""


@cache
def run_name() -> str:
    """The folder of this run: inherited from the process that began it, or of this process's own making."""
    return env.log_run() or f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def new_log_file(name: str) -> Path:
    """An empty file for the output of ``name``."""
    folder = log_folder()
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    handle, path = tempfile.mkstemp(prefix=f"{safe}.", suffix=".log", dir=folder)
    os.close(handle)
    return Path(path)


def log_folder() -> Path:
    """The folder of this run's logs, made if it is not there; making it removes those of runs long past."""
    chosen = env.log_dir()
    if chosen is not None:
        folder = Path(chosen)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    base = Path(tempfile.gettempdir()) / f"slime-{os.getuid()}"
    folder = base / run_name()
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        remove_old_runs(base)
    return folder


def remove_old_runs(base: Path, *, keep: int = KEEP_RUNS, still_writing_s: float = STILL_WRITING_S) -> list[Path]:
    """Remove all but the last ``keep`` runs under ``base``, and logs of earlier versions that lie beside them.

    Args:
        base: the folder of runs.
        keep: runs that stay.
        still_writing_s: nothing that was written to within so many seconds is removed.

    Returns:
        What was removed.
    """
    runs = sorted((path for path in base.glob("run-*") if path.is_dir()), key=_last_write_s, reverse=True)
    candidates = [*runs[keep:], *base.glob("*.log")]
    removed = []
    for path in candidates:
        if time.time() - _last_write_s(path) < still_writing_s:
            continue
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        except FileNotFoundError:
            continue  # another run, starting now, was faster
        except OSError as error:
            logger.warning("old logs in %s stay: %s", path, error)
            continue
        removed.append(path)
    return removed


def _last_write_s(path: Path) -> float:
    """When something was last written there, in seconds of the clock; 0 when it is gone."""
    try:
        own = path.stat().st_mtime
        return max([own, *(entry.stat().st_mtime for entry in path.iterdir())]) if path.is_dir() else own
    except FileNotFoundError:
        return 0.0
