"""The tensors of a push that must come to an engine in one bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from slime.utils.errors import WeightSyncError

Item = TypeVar("Item")

TogetherWith = Callable[[str], tuple[str, ...]]
"""The names, the given one included, that an engine must receive in one call; empty for an independent name."""


def iter_units(
    named: Iterable[tuple[str, Item]], together_with: TogetherWith | None
) -> Iterator[list[tuple[str, Item]]]:
    """Yield single tensors, and complete groups of those that must travel together, in the order of the last member.

    Raises:
        WeightSyncError: the tensors end, and some wait for a partner that did not come.
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
