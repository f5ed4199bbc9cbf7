"""Values of a flag and the algorithms they name: one table from which flag, errors and pages are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from slime.utils.errors import ConfigError, HookError
from slime.utils.misc import load_function

Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry], Generic[Entry]):
    """A read-only table of named algorithms.

    Invariant: an entry never changes.  What is not in the table comes in by its import path, where the table takes
    paths: nothing has to be registered before flags are read, and every process of a job finds the same thing.
    """

    def __init__(
        self, flag: str, entries: Mapping[str, Entry], *, adopt: Callable[[str, Any], Entry] | None = None
    ) -> None:
        """Make a table for ``flag``.

        Args:
            flag: the flag whose values the names are, for messages.
            entries: name to algorithm, in the order in which they are listed.
            adopt: turns ``(import path, what it names)`` into an entry, or raises ``HookError``; None when the flag
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
        """Return True when ``name`` is in the table, or may be the import path of something that is not."""
        return name in self._entries or (self._adopt is not None and "." in name)

    def resolve(self, name: str) -> Entry:
        """Return the algorithm that a value of the flag names.

        Raises:
            ConfigError: the name is unknown; the message lists those there are.
            HookError: an import path cannot be loaded, or names something that is no such algorithm.
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
