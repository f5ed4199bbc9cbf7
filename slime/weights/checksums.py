"""Checksums by name, for bytes that travel over disk (``--update-weight-delta-checksum``)."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Protocol

import xxhash

from slime.utils.errors import ConfigError


class Checksum(Protocol):
    """A checksum that grows with the data; any contiguous buffer will do."""

    def update(self, data: Any, /) -> Any: ...

    def hexdigest(self) -> str: ...


class Adler32:
    """zlib's 32-bit sum: everywhere available, and weak; for readers that know nothing better."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any, /) -> None:
        """Take more data."""
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        """Eight hex digits."""
        return f"{self._value:08x}"


def _blake3() -> Checksum:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise ConfigError(
            "--update-weight-delta-checksum blake3 needs the package blake3, which is not installed here (trainer and "
            "engine hosts need it); pip install blake3, or use xxh3-128"
        ) from error
    return blake3()


CHECKSUMS: dict[str, Callable[[], Checksum]] = {
    "xxh3-128": xxhash.xxh3_128,
    "blake3": _blake3,
    "adler32": Adler32,
}


def new_checksum(name: str) -> Checksum:
    """An empty checksum.

    Raises:
        ConfigError: the name is unknown, or its package is not installed.
    """
    if name not in CHECKSUMS:
        raise ConfigError(f"--update-weight-delta-checksum is {name!r}; there are {', '.join(CHECKSUMS)}")
    return CHECKSUMS[name]()


def checksum_of(name: str, data: Any) -> str:
    """Checksum of one contiguous buffer, as hex digits."""
    checksum = new_checksum(name)
    checksum.update(data)
    return checksum.hexdigest()
