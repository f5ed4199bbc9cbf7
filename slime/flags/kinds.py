"""Value types and choices of flags that argparse does not have."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from slime.algorithms.registry import Registry


def json_object(text: str) -> dict[str, Any]:
    """Return a flag's text as a JSON object, for example ``{"enable_thinking": false}``."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not JSON ({error}); write it as '{{\"key\": value}}'"
        ) from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is JSON, but not an object; write it as '{{\"key\": value}}'")
    return value


def number_in(low: float, high: float, *, low_open: bool = False) -> Callable[[str], float]:
    """Return a float type whose values lie in ``[low, high]``, or ``(low, high]`` when ``low_open``."""

    def number(text: str) -> float:
        value = _number(text)
        if not (low < value if low_open else low <= value) or not value <= high:
            bracket = "(" if low_open else "["
            raise argparse.ArgumentTypeError(f"{text} is outside {bracket}{low:g}, {high:g}]")
        return value

    return number


def _whole(text: str) -> int:
    """Return the number that ``text`` is; argparse's own message would name our function, not what is allowed."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (digits only, without a unit)") from None


def _number(text: str) -> float:
    """Return as :func:`_whole`, with a fraction or an exponent."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def positive_int(text: str) -> int:
    """Return an integer of at least 1."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value


def non_negative_int(text: str) -> int:
    """Return an integer of at least 0."""
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative; it must be 0 or more")
    return value


def port_number(text: str) -> int:
    """Return the number of a TCP port."""
    value = _whole(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port; ports are 1 to 65535")
    return value


def positive_float(text: str) -> float:
    """Return a number above 0."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def non_negative_float(text: str) -> float:
    """Return a finite number of at least 0."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 0 or more")
    return value


def top_k(text: str) -> int:
    """Return how many tokens to draw from: at least 1, or -1 for all."""
    value = _whole(text)
    if value < 1 and value != -1:
        raise argparse.ArgumentTypeError(f"{text} is no valid top-k; give 1 or more, or -1 for all")
    return value


class RegistryChoices:
    """``choices=`` of a flag; what argparse and the pages list are the names, in the registry's order."""

    def __init__(self, registry: Registry[Any]) -> None:
        self._registry = registry

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and self._registry.takes(value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)
