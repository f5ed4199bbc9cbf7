"""An execution as it is at one moment, for a writer that comes to it later.

``snapshot`` runs on the event loop and copies references only, but for what our own code changes in place.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from slime.rollout.ledger.packed_fields import LISTS_OF_NUMBERS, PACK_ERRORS, PACKED
from slime.utils.types import Sample

DEFAULTS = Sample().to_dict()
"""What an execution that nobody issued is compared with."""


class Snapshot(NamedTuple):
    """A sample at one moment."""

    values: dict[str, Any]
    num_tokens: int


class Leaves(NamedTuple):
    """An execution: its samples, and how they nest."""

    samples: list[Snapshot]
    shape: Any
    """0 for a single Sample; else a nested list of sample positions."""


class PackedNow(NamedTuple):
    """A list of numbers that was packed when it was taken."""

    value: list[Any]
    data: bytes


def snapshot(entry: Sample | list[Any], *, copy_lists: bool = False, pack_now: bool = False) -> Leaves:
    """Hold an execution as it is now.

    Args:
        entry: a Sample, or samples nested in lists.
        copy_lists: whether user code may change lists in place before they are written.  Our own code only replaces
            or extends them.
        pack_now: pack tokens, log-probs and mask at once.  An answer that has just been parsed lies in the caches of
            this core; for the writer's thread each number is a fetch from another core's.
    """
    if isinstance(entry, Sample):
        return Leaves([_snapshot_sample(entry, copy_lists, pack_now)], 0)
    samples: list[Snapshot] = []

    def shape_of(item: Any) -> Any:
        if isinstance(item, Sample):
            samples.append(_snapshot_sample(item, copy_lists, pack_now))
            return len(samples) - 1
        return [shape_of(part) for part in item]

    return Leaves(samples, shape_of(entry))


def _snapshot_sample(sample: Sample, copy_lists: bool, pack_now: bool) -> Snapshot:
    values = sample.__dict__.copy()
    num_tokens = len(sample.tokens)
    # What our own code changes in place; the writer comes to it later.
    values["status"] = sample.status.value
    values["weight_versions"] = sample.weight_versions[:]
    values["metadata"] = sample.metadata.copy()
    values["prefix_cache_info"] = sample.prefix_cache_info.to_dict()
    values["spec_info"] = sample.spec_info.to_dict()
    if pack_now:
        for name in LISTS_OF_NUMBERS:
            value = values.get(name)
            if type(value) is list and value:
                with contextlib.suppress(*PACK_ERRORS):  # then it is pickled, like anything that is no number
                    values[name] = PackedNow(value, PACKED[name].pack(value))
    if copy_lists:
        for name, value in values.items():
            if type(value) is list or type(value) is dict:
                values[name] = value.copy()
    return Snapshot(values, num_tokens)
