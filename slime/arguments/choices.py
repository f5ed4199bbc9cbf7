"""The values of a flag that chooses an algorithm: the names of a registry, or an import path where it takes one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.algorithms.registry import Registry


class RegistryChoices:
    """``choices=`` of a flag; what argparse and the pages list are the names, in the registry's order."""

    def __init__(self, registry: Registry[Any]) -> None:
        self._registry = registry

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and self._registry.takes(value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)
