"""Folders in the system's temporary folder that are this user's alone, and checks of what others may have put there.

Not in ``XDG_RUNTIME_DIR``: systemd removes that when its user logs out, while jobs run on, and it is memory.

    python -m slime.utils.private_folder       print a new folder for a Ray cluster (scripts)
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from slime.utils import env
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

RAY = "ray"
"""The folder of Ray in one of :func:`new_ray_folder`.  Ray lets everybody write to it, so its parent must not."""
MAX_RAY_BYTES = 107 - len("/session_2026-11-28_16-56-05_123456_1234567/sockets/plasma_store.1")
"""The longest path of Ray's folder: the kernel allows 107 bytes for the path of a socket."""


def problem_of(found: os.stat_result, user: int | None = None) -> str:
    """Return why a file or folder is not this user's, in words; empty when it is.

    Args:
        found: of ``os.lstat`` or ``os.fstat``.
        user: by default the one of this process.
    """
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if found.st_uid != (os.geteuid() if user is None else user):
        return f"belongs to user {found.st_uid}"
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        return "has a second name"
    return ""


def new_folder(name: str) -> Path:
    """Make a folder of mode 0700 whose name nobody can foresee."""
    return Path(tempfile.mkdtemp(prefix=f"slime-{name}-", dir=_temporary()))


def new_ray_folder() -> Path:
    """Make a folder of mode 0700 for a Ray cluster, with a folder ``RAY`` in it, its ``_temp_dir``.

    It is in ``RAY_TMPDIR``, else in the temporary folder.  Where sockets there would have too long a path, it is in
    /tmp, and ``RAY`` is a link.
    """
    folder = Path(tempfile.mkdtemp(prefix="slime-ray-", dir=env.get_str("RAY_TMPDIR") or _temporary()))
    if len(os.fsencode(folder / RAY)) > MAX_RAY_BYTES:
        long, folder = folder, Path(tempfile.mkdtemp(prefix="slime-ray-", dir="/tmp"))
        (folder / RAY).symlink_to(long)
    else:
        (folder / RAY).mkdir()
    return folder


def remove_ray_folder(folder: Path) -> None:
    """Remove what :func:`new_ray_folder` made."""
    shutil.rmtree((folder / RAY).resolve(), ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def user_folder() -> Path:
    """Return the folder that all processes of this user share, ``slime-UID`` in the temporary folder."""
    return own_folder(_temporary() / f"slime-{os.getuid()}")


def own_folder(path: Path) -> Path:
    """Return ``path``, a folder of this user, of mode 0700; it is made when it is missing.

    Raises:
        ConfigError: a link, a file or another user's folder is there.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    problem = problem_of(found) or ("" if stat.S_ISDIR(found.st_mode) else "is no folder")
    if problem:
        raise ConfigError(
            f"{path} {problem}, and user {os.geteuid()} would keep files there. Remove it, or set the environment "
            "variable TMPDIR to a folder of yours."
        )
    if stat.S_IMODE(found.st_mode) & 0o077:  # as earlier versions made it
        path.chmod(0o700)
    return path


def _temporary() -> Path:
    """Return the temporary folder, and warn where other users may exchange what is in it."""
    folder = Path(tempfile.gettempdir())
    found = folder.stat()
    is_open = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    if is_open or found.st_uid not in (0, os.geteuid()):
        logger.warning(
            "Other users may exchange files in the temporary folder %s (owner %d, mode %o): have its owner set the "
            "sticky bit (chmod +t), or set TMPDIR to a folder of yours.",
            folder,
            found.st_uid,
            stat.S_IMODE(found.st_mode),
        )
    return folder


if __name__ == "__main__":
    print(new_ray_folder())
