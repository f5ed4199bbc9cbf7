"""Groups, the answers to one prompt: their types and how to walk through them.

A group is a list with one entry per execution of its prompt.  An entry is a Sample, or a list of Samples when a custom
generate function fanned that execution out (sub-agents, compacted contexts); the loop treats both alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from slime.utils.types import Sample

Entry: TypeAlias = "Sample | list[Any]"
Group: TypeAlias = list[Entry]

_FINISHED = frozenset({Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED})


def leaf_samples(value: Entry | Iterable[Any]) -> Iterator[Sample]:
    """Yield every Sample of an entry, a group or a list of groups, in order, however deep the nesting."""
    if isinstance(value, Sample):
        yield value
        return
    for item in value:
        yield from leaf_samples(item)


def is_finished(value: Entry | Iterable[Any]) -> bool:
    """Return True when no sample of it waits for the engine: each completed, was truncated or failed for good."""
    return all(sample.status in _FINISHED for sample in leaf_samples(value))


def first_index(group: Entry | Iterable[Any]) -> int:
    """Return the ``index`` of the group's first sample: the sort key of a rollout.  Samples without one go first."""
    for sample in leaf_samples(group):
        return -1 if sample.index is None else sample.index
    return -1


def has_response(group: Entry | Iterable[Any]) -> bool:
    """Return True when some sample of it already holds response tokens."""
    return any(sample.response_length > 0 for sample in leaf_samples(group))
