"""A table of the algorithms that a flag can name; the flag's help, errors and docs are generated from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from slime.utils.errors import ConfigError, HookError
from slime.utils.misc import load_function

Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry], Generic[Entry]):
    """A read-only table of named algorithms.

    Invariant: entries never change.  If the table accepts import paths, any other algorithm is named by its path.
    Nothing has to be registered before flags are read, and every process of a job finds the same algorithm.
    """

    def __init__(
        self, flag: str, entries: Mapping[str, Entry], *, adopt: Callable[[str, Any], Entry] | None = None
    ) -> None:
        """Create a table for ``flag``.

        Args:
            flag: The flag that takes the names, for messages.
            entries: Name -> algorithm, in display order.
            adopt: Converts ``(import path, imported object)`` to an entry, or raises ``HookError``; None if the flag
                takes names only.
        """
        self.flag = flag
        self._entries = dict(entries)
        self._adopt = adopt

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def takes(self, name: str) -> bool:
        """Return True if ``name`` is in the table, or if it may be an import path and the table accepts paths."""
        return name in self._entries or (self._adopt is not None and "." in name)

    def resolve(self, name: str) -> Entry:
        """Return the algorithm that a value of the flag names.

        Raises:
            ConfigError: the name is unknown; the message lists the known names.
            HookError: an import path cannot be loaded, or names something that is not such an algorithm.
        """
        if name in self._entries:
            return self._entries[name]
        if self._adopt is None or "." not in name:
            raise ConfigError(f"{self.flag} is {name!r}; it must be {self.allowed()}")
        try:
            found = load_function(name)
        except HookError as error:
            raise HookError(f"{self.flag}: {error}") from error
        return self._adopt(name, found)

    def allowed(self) -> str:
        """Return the values that the flag takes, for a message."""
        own = ", or the import path of one of your own (package.module.attribute)" if self._adopt else ""
        return f"one of {', '.join(self._entries)}{own}"
