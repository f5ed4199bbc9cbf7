"""Value types and choices of flags that argparse does not have.

For every flag, numbers are finite and texts contain no NUL: ``Parser`` (parser.py) replaces ``int``, ``float`` and
``str`` with ``any_int``, ``any_float`` and ``text``.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slime.utils.files import parse_object

if TYPE_CHECKING:
    from slime.algorithms.registry import Registry

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, for example ``{"enable_thinking": false}``."""
    try:
        return parse_object(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text[:200]!r} is not JSON as it is needed ({error}); write it as '{{\"key\": value}}'"
        ) from error


def text_map(text: str) -> dict[str, str]:
    """Parse a JSON object whose values are strings, for example ``{"image": "images"}``."""
    values = json_object(text)
    wrong = next((name for name, value in values.items() if not isinstance(value, str)), None)
    if wrong is not None:
        raise argparse.ArgumentTypeError(f"{wrong!r} is {values[wrong]!r}; it must be a text in quotes")
    return values


def environment(text: str) -> dict[str, str | int | float]:
    """Parse a JSON object of environment variables, whose values are strings or numbers."""
    values = json_object(text)
    for name, value in values.items():
        if not name or "=" in name or "\0" in f"{name}{value}" or not isinstance(value, str | int | float):
            raise argparse.ArgumentTypeError(
                f'{name!r}: {value!r} is no environment variable; write \'{{"NAME": "value"}}\''
            )
    return values


@dataclass(frozen=True, kw_only=True)
class WholeNumber:
    """Type of a flag that takes the whole numbers from ``low`` to ``high``, and optionally ``also``."""

    low: int = 0
    high: int = INT32_MAX
    also: int | None = None
    """One more number, with a special meaning."""

    def __call__(self, text: str) -> int:
        """Parse ``text``; argparse's own message would not name the allowed range."""
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text[:80]!r} is not a whole number (digits only, without a unit)"
            ) from None
        if value != self.also and not self.low <= value <= self.high:
            raise argparse.ArgumentTypeError(f"{text[:80]} is not {self}")
        return value

    def __str__(self) -> str:
        also = "" if self.also is None else f", or {self.also}"
        if self.low < -1:
            return f"a whole number from {self.low} to {self.high}{also}"
        upper = f" and at most {self.high}" if self.high < INT64_MAX else ""
        return f"a whole number of {self.low} or more{upper}{also}"


@dataclass(frozen=True, kw_only=True)
class Number:
    """Type of a flag that takes the finite numbers from ``low`` to ``high``."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    """Exclude ``low``."""
    high_open: bool = False

    def __call__(self, text: str) -> float:
        """Parse ``text``."""
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a number") from None
        above = self.low < value if self.low_open else self.low <= value
        below = value < self.high if self.high_open else value <= self.high
        if not (math.isfinite(value) and above and below):
            raise argparse.ArgumentTypeError(f"{text[:80]} is not {self}")
        return value

    def __str__(self) -> str:
        bounds = []
        if self.low > -math.inf:
            bounds.append(f"above {self.low:g}" if self.low_open else f"of {self.low:g} or more")
        if self.high < math.inf:
            bounds.append(f"below {self.high:g}" if self.high_open else f"at most {self.high:g}")
        return f"a finite number {' and '.join(bounds)}".rstrip()


any_int = WholeNumber(low=-INT64_MAX, high=INT64_MAX)
positive_int = WholeNumber(low=1)
non_negative_int = WholeNumber()
int_or_minus_one = WholeNumber(also=-1)
positive_int_or_minus_one = WholeNumber(low=1, also=-1)
byte_count = WholeNumber(low=1, high=INT64_MAX)
gpu_count = WholeNumber(high=1_000_000)
positive_gpu_count = WholeNumber(low=1, high=1_000_000)
minutes = WholeNumber(low=1, high=1_000_000)
port_number = WholeNumber(low=1, high=65535)
seed = WholeNumber(high=INT32_MAX)
"""A seed.  Ranks and samples add small numbers to it, and NumPy's seeds must be below 2**32."""

any_float = Number()
positive_float = Number(low=0, low_open=True)
non_negative_float = Number(low=0)
fraction = Number(low=0, high=1)
positive_fraction = Number(low=0, high=1, low_open=True)
fraction_below_one = Number(low=0, high=1, high_open=True)
wait_s = Number(low=0, high=1e9, low_open=True)
"""Seconds of a wait; Python's locks accept at most 9e9."""
wait_s_or_zero = Number(low=0, high=1e9)


def text(value: str) -> str:
    """Return ``value`` if it contains no NUL, which neither file systems nor processes accept."""
    if "\0" in value:
        raise argparse.ArgumentTypeError(f"{value!r} has a NUL character in it; remove it")
    return value


def file_path(value: str) -> str:
    """Return a path or import path with a leading ``~`` expanded; reject an empty one (an unset shell variable).

    The shell does not expand ``~`` in a YAML file or after ``=``.
    """
    if not value.strip():
        raise argparse.ArgumentTypeError(f"{value!r} is empty; is a shell variable unset? Give a path, or no flag")
    return home_path(value)


def home_path(value: str) -> str:
    """Return ``value``, which may be empty, with a leading ``~`` expanded."""
    return os.path.expanduser(text(value))


def named_path(value: str) -> str:
    """Return ``NAME=DIR`` or ``DIR``, with a leading ``~`` of the folder expanded."""
    name, equals, folder = file_path(value).partition("=")
    return name + equals + home_path(folder)


def http_url(value: str) -> str:
    """Return the address of an HTTP service."""
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, an open bracket
        is_url = False
    if not is_url or any(letter.isspace() or not letter.isprintable() for letter in value):
        raise argparse.ArgumentTypeError(
            f"{value!r} is no address; write http://HOST:PORT/PATH or https://..., with a port from 1 to 65535"
        )
    return value


class RegistryChoices:
    """``choices=`` of a flag: the names of a registry, listed in the registry's order."""

    def __init__(self, registry: Registry[Any]) -> None:
        self._registry = registry

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and self._registry.takes(value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)
