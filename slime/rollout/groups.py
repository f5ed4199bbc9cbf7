"""Questions about a group: the answers to one prompt.

A group is a list with one entry per execution of its prompt.  An entry is a Sample, or a list of Samples when a custom
generate function fanned that execution out (sub-agents, compacted contexts); the loop treats both alike.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from slime.utils.errors import HookError
from slime.utils.types import Sample

Entry: TypeAlias = "Sample | list[Any]"
Group: TypeAlias = list[Entry]

_FINISHED = frozenset({Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED})


def leaf_samples(value: Entry | Iterable[Any]) -> Iterator[Sample]:
    """Every Sample of an entry, a group or a list of groups, in order, however deep the nesting."""
    if isinstance(value, Sample):
        yield value
        return
    for item in value:
        yield from leaf_samples(item)


def is_finished(value: Entry | Iterable[Any]) -> bool:
    """True when no sample of it waits for the engine: each completed, was truncated or failed for good."""
    return all(sample.status in _FINISHED for sample in leaf_samples(value))


def first_index(group: Entry | Iterable[Any]) -> int:
    """The ``index`` of the group's first sample: the sort key of a rollout.  Samples without one go first."""
    for sample in leaf_samples(group):
        return -1 if sample.index is None else sample.index
    return -1


def has_response(group: Entry | Iterable[Any]) -> bool:
    """True when some sample of it already holds response tokens."""
    return any(sample.response_length > 0 for sample in leaf_samples(group))


def refuse_pending(args: Namespace, group: Group) -> None:
    """Name the generate function that left every sample of a group as it was; such a group never ends.

    Raises:
        HookError: all are pending, and ``--custom-generate-function-path`` made them.
    """
    path = getattr(args, "custom_generate_function_path", None)
    if path and all(sample.status is Sample.Status.PENDING for sample in leaf_samples(group)):
        raise HookError(
            f"--custom-generate-function-path {path} returned samples with status pending; it must set sample.status: "
            "COMPLETED, TRUNCATED or FAILED (Sample.append_response_tokens with the engine's meta_info does)."
        )
