"""Files and folders: written whole or not at all, read with bounds where others wrote them, shut to other users.

A folder that somebody gives away can hold a link to any file of its reader, a pipe on which a read waits for ever, or
a device or a file with holes that fills the memory.  ``json.loads`` takes the last of two values of a key, NaN and
infinity; here a text has one meaning or is refused.

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
from pathlib import Path
from typing import IO, Any, BinaryIO

from slime.utils import env
from slime.utils.errors import ConfigError, DataError, SlimeError

logger = logging.getLogger(__name__)

# Written whole


def write_atomically(
    path: Path, write: Callable[[IO[bytes]], Any], *, what: str, flag: str = "--save", to_disk: bool = True
) -> None:
    """Write beside ``path`` and rename: a crash leaves the old file or the new one.

    Args:
        to_disk: outlive a crash of the machine, too, at the price of waiting for the disk.

    Raises:
        DataError: it cannot be written (a full disk); the old file is still there.
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
    """Write a file as :func:`write_atomically` does; an error is the one that the disk, or ``write``, raised."""
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
            unfinished.unlink()  # half a file would take the room that is missing
        raise
    if to_disk:
        sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(descriptor: int, path: Path, *, timeout_s: float, poll_s: float) -> None:
    """Take the exclusive ``flock`` of the open file ``path``; it goes with the descriptor, or with the process.

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
"""Of files of JSON."""


def check_inside(path: Path) -> None:
    """Refuse a file that is a link out of its folder; the hub's cache keeps its files in ``blobs`` nearby.

    Raises:
        DataError: it leads elsewhere.
    """
    if not path.is_symlink():
        return
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    snapshots = [above for above in folder.parents if above.name == "snapshots"]
    if target.parent not in (folder, *(above.parent / "blobs" for above in snapshots)):
        raise DataError(f"{path} is a link to {target}, outside of its folder; put the file itself there.")


@contextmanager
def opened(path: Path, *, max_bytes: int | None = None, error: type[SlimeError] = DataError) -> Iterator[BinaryIO]:
    """Open a file for reading, once it is one.

    Raises:
        OSError: the file system's, such as FileNotFoundError.
        DataError: it leads out of its folder.
    """
    check_inside(path)
    # A pipe would wait for its writer.
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
        DataError: it cannot be read, is no file, leads out of its folder, or is larger than ``max_bytes``.
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
"""Key of a config.json -> what its value must be where it is not null, and that in words."""
_OF_FOLDER = ("model_type", "architectures", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
"""Keys that a ``text_config`` may have as well, perhaps with another value, and that a model reads at the top."""


def parse_object(data: str | bytes, *, takes_infinity: bool = False) -> dict[str, Any]:
    """Return the object that a JSON text in UTF-8 is; arguments as in :func:`parse_value`.

    Raises:
        ValueError: as :func:`parse_value`, or it is something else.
    """
    value = parse_value(data, takes_infinity=takes_infinity)
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value


def parse_value(data: str | bytes, *, takes_infinity: bool = False) -> Any:
    """Return what a JSON text in UTF-8 says.

    Args:
        takes_infinity: ``Infinity`` is a number, as Python writes it: published config.json files have bounds of it.

    Raises:
        ValueError: it is none, or a key is there twice, a number is not finite, half a surrogate pair is in a text;
            one line.
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
        raise ValueError("it is nested too deep") from None
    return value


def read_object(
    path: str | Path, *, flag: str = "", error: type[SlimeError] = DataError, remedy: str = COPY_AGAIN
) -> dict[str, Any]:
    """Return the object in a file.

    Raises:
        ConfigError: there is no such file.
    """
    place = f"{flag}: {path}" if flag else str(path)
    if not Path(path).is_file():
        raise ConfigError(f"{place} does not exist, or is no file; give the folder that it belongs to.")
    try:
        return parse_object(read_outside_file(Path(path)), takes_infinity=True)
    except ValueError as reason:
        raise error(f"{place} is not JSON as it is needed: {reason}. {remedy}") from reason


def read_model_config(
    folder: str | Path, *, flag: str = "--hf-checkpoint", error: type[SlimeError] = ConfigError
) -> dict[str, Any]:
    """Return ``config.json`` of a Hugging Face folder, ``quantization_config`` at the top.

    Raises:
        ConfigError: there is none.
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
    """Return the family's name in ``config.json``, which decides the names of tensors.

    Raises:
        ConfigError: it is not there.
    """
    if not (name := read_model_config(folder, flag=flag).get("model_type")):
        raise ConfigError(f"{flag}: {Path(folder) / 'config.json'} has no model_type. {COPY_AGAIN}")
    return str(name)


def language_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a config.json says of the language model.

    Where there is a ``text_config``, its keys are over those of the top, except for what the top decides.
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
"""The folder of Ray in one of :func:`new_ray_folder`.  Ray lets everybody write to it, so its parent must not."""
MAX_RAY_BYTES = 107 - len("/session_2026-11-28_16-56-05_123456_1234567/sockets/plasma_store.1")
"""The longest path of Ray's folder: the kernel allows 107 bytes for the path of a socket."""


def problem_of(found: os.stat_result, user: int | None = None) -> str:
    """Return why a file or folder is not this user's, in words; empty when it is."""
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if found.st_uid != (os.geteuid() if user is None else user):
        return f"belongs to user {found.st_uid}"
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        return "has a second name"
    return ""


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
