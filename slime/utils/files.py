"""Files and folders: atomic writes, bounded reads of files from others, and folders closed to other users.

A folder from somebody else can contain a link to any file of its reader, a pipe on which a read waits forever, or a
device or sparse file that fills the memory.  ``json.loads`` accepts duplicate keys (the last one wins), NaN and
infinity; the functions here refuse such ambiguous texts.

    python -m slime.utils.files       print a new folder for a Ray cluster (scripts)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import shutil
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, BinaryIO

from slime.utils import env
from slime.utils.errors import ConfigError, DataError, SlimeError

logger = logging.getLogger(__name__)

# Written whole


def write_atomically(
    path: Path, write: Callable[[IO[bytes]], Any], *, what: str, flag: str = "--save", to_disk: bool = True
) -> None:
    """Write to a temporary file next to ``path`` and rename it: a crash leaves the old file or the new one.

    Args:
        write: writes the content to the given file.
        what: the content's name in the error message.
        flag: the flag to change, for the error message.
        to_disk: survive a crash of the machine too, at the cost of waiting for the disk.

    Raises:
        DataError: the file cannot be written (a full disk); the old file is kept.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, write, to_disk=to_disk)
    except (OSError, RuntimeError) as error:  # torch.save says RuntimeError when its file fails
        raise DataError(
            f"{what} cannot be written to {path} ({type(error).__name__}: {error}). Free some space there, or "
            f"choose another folder with {flag}; the previous content is intact."
        ) from error


def replace_file(path: Path, write: Callable[[IO[bytes]], Any], *, to_disk: bool = True) -> None:
    """Write a file like :func:`write_atomically`, but raise the original error."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with unfinished.open("wb") as file:
            write(file)
            if to_disk:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()  # a partial file would take up scarce disk space
        raise
    if to_disk:
        sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(descriptor: int, path: Path, *, timeout_s: float, poll_s: float) -> None:
    """Take an exclusive ``flock`` on the open file ``path``; it is released with the descriptor or the process.

    Raises:
        TimeoutError: another process has held it for ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has locked {path} for more than {timeout_s:g} s") from None
        time.sleep(poll_s)


# Read with bounds

MAX_TEXT_BYTES = 512 << 20
"""Maximum size of JSON files."""


def similar_path(path: str | Path) -> str:
    """Return `` Did you mean PATH?`` with a neighbour of a missing path that has a similar name; empty without one."""
    folder = Path(path).absolute().parent
    try:
        names = os.listdir(folder)
    except OSError:  # the message is about the path, not about its folder
        return ""
    similar = get_close_matches(Path(path).name, names, n=1)
    return f" Did you mean {folder / similar[0]}?" if similar else ""


def check_inside(path: Path) -> None:
    """Refuse a link out of the file's folder, except into the ``blobs`` folder of the hub's cache.

    Raises:
        DataError: the link leads elsewhere.
    """
    if not path.is_symlink():
        return
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    snapshots = [above for above in folder.parents if above.name == "snapshots"]
    if target.parent not in (folder, *(above.parent / "blobs" for above in snapshots)):
        raise DataError(f"{path} is a link to {target}, outside of its folder; put the file itself there.")


@contextmanager
def opened(path: Path, *, max_bytes: int | None = None, error: type[SlimeError] = DataError) -> Iterator[BinaryIO]:
    """Open a regular file for reading.

    Raises:
        OSError: from the file system, such as FileNotFoundError.
        DataError: the file is a link out of its folder.
        SlimeError: (``error``) it is not a regular file, or is larger than ``max_bytes``.
    """
    check_inside(path)
    # O_NONBLOCK, because opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise error(f"{path} is a folder, a pipe or a device, and a file is needed. Copy it again.")
        if max_bytes is not None and about.st_size > max_bytes:
            raise error(f"{path} has {about.st_size} bytes, and at most {max_bytes} are read. Copy it again.")
        yield file


def read_outside_file(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        DataError: it cannot be read, is not a regular file, is a link out of its folder, or exceeds ``max_bytes``.
    """
    try:
        with opened(path, max_bytes=max_bytes) as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error


# JSON

COPY_AGAIN = "Download or copy it again."
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("model_type", "dtype", "torch_dtype"), (lambda value: isinstance(value, str), "a text")),
    **dict.fromkeys(
        ("text_config", "vision_config", "quantization_config", "rope_scaling", "rope_parameters"),
        (lambda value: isinstance(value, dict), "an object"),
    ),
    **dict.fromkeys(
        (
            *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "vocab_size", "max_position_embeddings"),
        ),
        (lambda value: type(value) is int and value > 0, "a whole number above 0"),
    ),
    **dict.fromkeys(
        ("rope_theta", "rms_norm_eps"), (lambda value: type(value) in (int, float) and value > 0, "a number above 0")
    ),
}
"""Key of a config.json -> check of its value if not null, and that check in words."""
_OF_FOLDER = ("model_type", "architectures", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
"""Keys that models read at the top level, even if ``text_config`` has them with other values."""


def parse_object(data: str | bytes, *, takes_infinity: bool = False) -> dict[str, Any]:
    """Parse a JSON object from UTF-8 text; see :func:`parse_value` for arguments.

    Raises:
        ValueError: see :func:`parse_value`; or the text is not an object.
    """
    value = parse_value(data, takes_infinity=takes_infinity)
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value


def parse_value(data: str | bytes, *, takes_infinity: bool = False) -> Any:
    """Parse a JSON value from UTF-8 text.

    Args:
        takes_infinity: accept ``Infinity``, as written by Python: published config.json files use it as a bound.

    Raises:
        ValueError: the text is not JSON, or has a duplicate key, a non-finite number or an unpaired surrogate; the
            message is one line.
    """

    def constant(text: str) -> float:
        if text == "Infinity" and takes_infinity:
            return math.inf
        raise ValueError(f"it has {text}, which JSON does not have")

    text = data if isinstance(data, str) else data.decode("utf-8")
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=constant, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def read_object(
    path: str | Path, *, flag: str = "", error: type[SlimeError] = DataError, remedy: str = COPY_AGAIN
) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigError: there is no such file.
        SlimeError: (``error``, by default DataError) the content is not a JSON object.
    """
    place = f"{flag}: {path}" if flag else str(path)
    if not Path(path).is_file():
        raise ConfigError(f"{place} does not exist or is not a file; give the folder that it belongs to.")
    try:
        return parse_object(read_outside_file(Path(path)), takes_infinity=True)
    except ValueError as reason:
        raise error(f"{place} is not JSON as it is needed: {reason}. {remedy}") from reason


def read_model_config(
    folder: str | Path, *, flag: str = "--hf-checkpoint", error: type[SlimeError] = ConfigError
) -> dict[str, Any]:
    """Return ``config.json`` of a Hugging Face folder, with ``quantization_config`` moved to the top level.

    Raises:
        ConfigError: the file is missing; or (as ``error``) it is not JSON or has a value of a wrong type.
    """
    path = Path(folder) / "config.json"
    config = read_object(path, flag=flag, error=error)
    for part in (config, config.get("text_config"), config.get("vision_config")):
        for name, value in (part or {}).items():
            fits, words = _FORMS.get(name, (lambda value: True, ""))
            if value is not None and not fits(value):
                shown = f"{flag}: {path}: {name} is {str(value)[:80]!r}"
                raise error(f"{shown}; it must be {words}. {COPY_AGAIN}")
    quantized = (config.get("text_config") or {}).get("quantization_config")
    return config if quantized is None else {"quantization_config": quantized, **config}


def read_model_type(folder: str | Path, *, flag: str = "--hf-checkpoint") -> str:
    """Return ``model_type`` from ``config.json``, the family name that determines tensor names.

    Raises:
        ConfigError: it is missing.
    """
    if not (name := read_model_config(folder, flag=flag).get("model_type")):
        raise ConfigError(f"{flag}: {Path(folder) / 'config.json'} has no model_type. {COPY_AGAIN}")
    return str(name)


def language_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a config.json.

    Keys of ``text_config``, if any, override those of the top level, except for keys that the top level decides.
    """
    text = config.get("text_config") or {}
    return {**config, **{name: text[name] for name in text if name not in _OF_FOLDER or config.get(name) is None}}


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {name[:80]!r} twice")
    return values


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:80]} is larger than a float may be")
    return value


# Folders of this user

RAY = "ray"
"""Ray's folder inside a folder of :func:`new_ray_folder`.  Ray makes it world-writable, so the parent is private."""
MAX_RAY_BYTES = 107 - len("/session_2026-11-28_16-56-05_123456_1234567/sockets/plasma_store.1")
"""Maximum path length of Ray's folder: the kernel allows 107 bytes for a socket's path."""


def problem_of(found: os.stat_result, user: int | None = None) -> str:
    """Describe why a file or folder is not this user's; empty if it is."""
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if found.st_uid != (os.geteuid() if user is None else user):
        return f"belongs to user {found.st_uid}"
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        return "has a second name"
    return ""


def new_ray_folder() -> Path:
    """Create a folder of mode 0700 for a Ray cluster; its subfolder ``RAY`` serves as Ray's ``_temp_dir``.

    It is created in ``RAY_TMPDIR``, else in the temporary folder.  If socket paths there would be too long, it is
    created in /tmp, and ``RAY`` is a link.
    """
    folder = Path(tempfile.mkdtemp(prefix="slime-ray-", dir=env.get_str("RAY_TMPDIR") or _temporary()))
    if len(os.fsencode(folder / RAY)) > MAX_RAY_BYTES:
        long, folder = folder, Path(tempfile.mkdtemp(prefix="slime-ray-", dir="/tmp"))
        (folder / RAY).symlink_to(long)
    else:
        (folder / RAY).mkdir()
    return folder


def remove_ray_folder(folder: Path) -> None:
    """Remove a folder made by :func:`new_ray_folder`."""
    shutil.rmtree((folder / RAY).resolve(), ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def user_folder() -> Path:
    """Return ``slime-UID`` in the temporary folder, which all processes of this user share."""
    return own_folder(_temporary() / f"slime-{os.getuid()}")


def own_folder(path: Path) -> Path:
    """Return ``path`` as a folder of this user with mode 0700, creating it if missing.

    Raises:
        ConfigError: ``path`` is a link, a file or another user's folder.
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
    if stat.S_IMODE(found.st_mode) & 0o077:  # created by an earlier version
        path.chmod(0o700)
    return path


def _temporary() -> Path:
    """Return the temporary folder; warn if other users may replace files in it."""
    folder = Path(tempfile.gettempdir())
    found = folder.stat()
    is_open = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    if is_open or found.st_uid not in (0, os.geteuid()):
        logger.warning(
            "Other users may replace files in the temporary folder %s (owner %d, mode %o): have its owner set the "
            "sticky bit (chmod +t), or set TMPDIR to a folder of yours.",
            folder,
            found.st_uid,
            stat.S_IMODE(found.st_mode),
        )
    return folder


if __name__ == "__main__":
    print(new_ray_folder())
