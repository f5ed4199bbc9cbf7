"""Samples from what ``packing`` made of them: records applied to the fields of a sample, in order."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from slime.rollout.ledger.packed_fields import PACKED
from slime.rollout.ledger.records import decode_value
from slime.rollout.ledger.snapshots import DEFAULTS
from slime.utils.errors import DataError
from slime.utils.types import Sample


def apply_leaf(base: dict[str, Any], leaf: Mapping[str, Any], blob: memoryview) -> tuple[dict[str, Any], int]:
    """The fields of a sample after one record, as ``Sample.to_dict`` names them, and the bytes of ``blob`` used.

    Applying records twice, or to a later state of the same sample, gives the same.

    Raises:
        DataError: the record continues a response that ``base`` does not hold.
    """
    values = dict(base)
    offset = 0
    for name, start, num_bytes in leaf["packed"]:
        packing = PACKED[name]
        data = bytes(blob[offset : offset + num_bytes])
        offset += num_bytes
        if start:
            held = packing.pack(values.get(name) or packing.unpack(b""))
            if len(held) < start:
                raise DataError(f"The ledger continues {name} at byte {start} where the sample has {len(held)} bytes.")
            data = held[:start] + data
        values[name] = packing.unpack(data)
    if leaf["rest"]:
        small, pickled, gone = decode_value(blob[offset : offset + leaf["rest"]])
        offset += leaf["rest"]
        for name in gone:
            values.pop(name, None)
        values |= small
        values |= {name: pickle.loads(data) for name, data in pickled.items()}
    return values, offset


def apply_entry(
    base: dict[str, Any] | None, entry: Mapping[str, Any], blob: memoryview
) -> tuple[dict[str, Any] | list[Any], int]:
    """An execution after one record: the fields of its sample, or nested lists of such; and the bytes used.

    Args:
        base: the fields of the sample as issued, or as an earlier record left them; None when nobody issued it.
    """
    offset = 0
    leaves = []
    for leaf in entry["leaves"]:
        start = base if entry["shape"] == 0 and base is not None else DEFAULTS
        values, used = apply_leaf(start, leaf, blob[offset:])
        leaves.append(values)
        offset += used
    return _arrange(entry["shape"], leaves), offset


def _arrange(shape: Any, leaves: list[dict[str, Any]]) -> Any:
    if isinstance(shape, list):
        return [_arrange(part, leaves) for part in shape]
    return leaves[shape]


def to_entry(values: dict[str, Any] | list[Any]) -> Any:
    """Samples from what ``apply_entry`` gave."""
    if isinstance(values, list):
        return [to_entry(item) for item in values]
    return Sample.from_dict(values)


def stripped_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The description of an execution without what its blob holds."""
    leaves = [{k: v for k, v in leaf.items() if k not in ("packed", "rest")} for leaf in entry["leaves"]]
    return {"shape": entry["shape"], "leaves": leaves}
