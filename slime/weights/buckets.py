"""Groups tensors that must reach an engine in the same bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from slime.utils.errors import WeightSyncError

Item = TypeVar("Item")

TogetherWith = Callable[[str], tuple[str, ...]]
"""Maps a name to all names (itself included) that an engine must receive in the same call; () if independent."""


def iter_units(
    named: Iterable[tuple[str, Item]], together_with: TogetherWith | None
) -> Iterator[list[tuple[str, Item]]]:
    """Yield independent tensors singly, and groups that must travel together when their last member arrives.

    Raises:
        WeightSyncError: a group is incomplete when the tensors end.
    """
    waiting: dict[tuple[str, ...], list[tuple[str, Item]]] = {}
    for name, item in named:
        group = together_with(name) if together_with is not None else ()
        if not group:
            yield [(name, item)]
            continue
        members = waiting.setdefault(group, [])
        members.append((name, item))
        if len(members) == len(group):
            yield waiting.pop(group)
    if waiting:
        group, members = next(iter(waiting.items()))
        missing = sorted(set(group) - {name for name, _ in members})
        raise WeightSyncError(
            f"{members[0][0]} must reach the engine together with {', '.join(missing)}, which the model does not "
            "have; the table in slime_plugins.models is wrong"
        )
