"""Encodes samples as bytes and back: per-token lists are packed, other fields encoded singly, unchanged ones omitted.

``snapshot`` captures an execution on the event loop.  It copies only references, except for what slime's own code
modifies in place.  ``EntryEncoder`` runs on the writer's thread; it remembers what it wrote of an execution and writes
only fields that have changed.  ``apply_entry`` decodes.

Token ids are int32, masks one byte, log-probs float32 (as the engine computed them).  Class instances (a client or
lock attached by a hook) are omitted, with a log line.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import xxhash

from slime.ext.ledger.frames import decode_value, encode_value
from slime.rollout import plain_values
from slime.utils.types import Sample


class Packing(NamedTuple):
    """Packs a list of numbers or a text into bytes, and back."""

    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]


def _numbers(code: str) -> Packing:
    width = struct.calcsize(f"<{code}")
    return Packing(
        lambda values: struct.pack(f"<{len(values)}{code}", *values),
        lambda data: list(struct.unpack(f"<{len(data) // width}{code}", data)),
    )


PACKED = {
    "tokens": _numbers("i"),
    "rollout_log_probs": _numbers("f"),
    "teacher_log_probs": _numbers("f"),
    "loss_mask": Packing(bytes, list),
    "response": Packing(str.encode, bytes.decode),
}
GROWING = ("rollout_log_probs", "loss_mask")
"""Fields with one item per response token."""
LISTS_OF_NUMBERS = ("tokens", *GROWING, "teacher_log_probs")
PACK_ERRORS = (struct.error, TypeError, ValueError, OverflowError, UnicodeError)

DEFAULTS = Sample().to_dict()
"""Base values for an execution that was never issued."""


class Snapshot(NamedTuple):
    """A sample's state at one moment."""

    values: dict[str, Any]
    num_tokens: int


class Snapshots(NamedTuple):
    """The samples of an execution and their nesting."""

    samples: list[Snapshot]
    shape: Any
    """0 for a single Sample; otherwise a nested list of positions in ``samples``."""


def snapshot(entry: Sample | list[Any], *, copy_lists: bool = False) -> Snapshots:
    """Return a snapshot of an execution.

    Args:
        entry: a Sample, or samples nested in lists.
        copy_lists: True if user code may modify lists in place before they are written.  slime's own code only
            replaces or extends them.
    """
    if isinstance(entry, Sample):
        return Snapshots([_snapshot_sample(entry, copy_lists)], 0)
    samples: list[Snapshot] = []

    def shape_of(item: Any) -> Any:
        if isinstance(item, Sample):
            samples.append(_snapshot_sample(item, copy_lists))
            return len(samples) - 1
        return [shape_of(part) for part in item]

    return Snapshots(samples, shape_of(entry))


def issued_fields(sample: Sample) -> dict[str, Any]:
    """Return a sample's fields at issue; lists of numbers are copied, because they grow in place."""
    values = _snapshot_sample(sample, copy_lists=False).values
    return values | {name: values[name].copy() for name in LISTS_OF_NUMBERS if type(values.get(name)) is list}


def _snapshot_sample(sample: Sample, copy_lists: bool) -> Snapshot:
    values = sample.__dict__.copy()
    num_tokens = len(sample.tokens)
    # slime's own code modifies these in place, and the writer reads them later.
    values["status"] = sample.status.value
    values["weight_versions"] = sample.weight_versions[:]
    values["metadata"] = (sample.metadata or {}).copy()  # a data source may set None
    values["prefix_cache_info"] = sample.prefix_cache_info.to_dict()
    values["spec_info"] = sample.spec_info.to_dict()
    if copy_lists:
        for name, value in values.items():
            if type(value) is list or type(value) is dict:
                values[name] = value.copy()
    return Snapshot(values, num_tokens)


TRANSIENT = ("trace",)
"""Fields that belong to the current rollout and are not stored."""

_DATA_FIELDS = frozenset({"prompt", "label", "multimodal_inputs", "apply_chat_template_kwargs"})
"""Fields from the data row, written only if they are not the same objects as at issue."""
_PLAIN = frozenset({str, int, float, bool, type(None)})
_MISSING = object()


class _Known(NamedTuple):
    """The last written state of a packed field: the object, its length at that time, and the digest of its bytes."""

    value: Any
    num_items: int
    digest: int


class EntryEncoder:
    """Encodes executions of open groups incrementally; used by the writer's thread.

    Invariant: applying everything written about a sample, in order, with ``apply_leaf`` to the sample as issued gives
    the sample at its last snapshot.
    """

    def __init__(self) -> None:
        self._known: dict[Any, dict[str, Any]] = {}

    def forget(self, keys: Iterable[Any] | None) -> None:
        """Forget these executions; None means all."""
        if keys is None:
            self._known.clear()
        for key in keys or ():
            self._known.pop(key, None)

    def encode(
        self, key: Any, leaves: Snapshots, issued: dict[str, Any] | None, *, trusts_lists: bool = False
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Return the description (for the head) and the bytes of an execution's changes.

        Args:
            key: identifies the execution.
            leaves: snapshot of the execution.
            issued: the fields of its sample at issue; None writes everything.
            trusts_lists: True if no user code has seen the execution since its last record, so that a list that is the
                same object has the same items.
        """
        chunks: list[bytes] = []
        described = []
        if leaves.shape != 0:  # a fan-out is written whole
            self.forget([key])
            key = issued = None
        for leaf in leaves.samples:
            known = self._known.get(key) or dict(issued or DEFAULTS)
            if key is not None:
                self._known[key] = known
            described.append(_encode_leaf(leaf, known, issued, chunks, trusts_lists))
        return {"shape": leaves.shape, "leaves": described}, chunks


def _encode_leaf(
    leaf: Snapshot, known: dict[str, Any], issued: dict[str, Any] | None, chunks: list[bytes], trusts_lists: bool
) -> dict[str, Any]:
    packed: list[list[Any]] = []
    encoded: dict[str, bytes] = {}
    values = leaf.values
    for name, value in values.items():
        earlier = known.get(name, _MISSING)
        if name in TRANSIENT or (type(value) in _PLAIN and type(earlier) is type(value) and earlier == value):
            continue
        if issued is not None and name in _DATA_FIELDS and value is issued.get(name, _MISSING):
            continue
        if name in PACKED and type(value) in (list, str) and len(value) > 0:
            num_items = _length(name, leaf)
            is_same = type(earlier) is _Known and value is earlier.value and num_items == earlier.num_items
            if is_same and trusts_lists:
                continue
            with contextlib.suppress(*PACK_ERRORS):  # if packing fails, it is encoded like other values
                data = PACKED[name].pack(value if len(value) == num_items else value[:num_items])
                known[name] = now = _Known(value, num_items, xxhash.xxh3_64_intdigest(data))
                if type(earlier) is not _Known or earlier.digest != now.digest:
                    packed.append([name, len(data)])
                    chunks.append(data)
                continue
        field = _encode_field(name, value)
        if field is not None and field != earlier:
            encoded[name], known[name] = field, value if type(value) in _PLAIN else field
    gone = [] if values.keys() >= known.keys() else [name for name in known if name not in values]
    for name in gone:
        del known[name]
    rest = encode_value([encoded, gone]) if encoded or gone else b""
    chunks.append(rest)
    return _summary(values) | {"packed": packed, "rest": len(rest)}


def _encode_field(name: str, value: Any) -> bytes | None:
    try:
        return plain_values.dumps(value, name=f"Sample.{name}", warning="Samples that the ledger recovers will lack")
    except plain_values.NotPlainError:
        return None


def _length(name: str, leaf: Snapshot) -> int:
    """Return the length of a packed field at the time of the snapshot; lists may have grown since."""
    if name == "tokens":
        return leaf.num_tokens
    value = leaf.values[name]
    return min(len(value), leaf.values["response_length"]) if name in GROWING else len(value)


def _summary(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample's summary for the head."""
    reward = values.get("reward")
    if isinstance(reward, dict):
        reward = {str(key): item for key, item in reward.items() if isinstance(item, int | float | bool)}
    elif not isinstance(reward, int | float | bool):
        reward = None
    versions = values.get("weight_versions") or []
    return {
        "status": values["status"],
        "response": values["response_length"],
        "reward": reward,
        "weights": [str(version) for version in versions],
    }


def apply_leaf(base: dict[str, Any], leaf: Mapping[str, Any], blob: memoryview) -> tuple[dict[str, Any], int]:
    """Return a sample's fields after one record (as ``Sample.to_dict``), and the number of bytes of ``blob`` used.

    Idempotent: applying a record again, or to a later state of the same sample, gives the same fields.
    """
    values = dict(base)
    offset = 0
    for name, num_bytes in leaf["packed"]:
        values[name] = PACKED[name].unpack(bytes(blob[offset : offset + num_bytes]))
        offset += num_bytes
    if leaf["rest"]:
        encoded, gone = decode_value(blob[offset : offset + leaf["rest"]])
        offset += leaf["rest"]
        for name in gone:
            values.pop(name, None)
        values |= {
            name: plain_values.loads(data, where=f"The ledger, Sample.{name},") for name, data in encoded.items()
        }
    return values, offset


def apply_entry(
    base: dict[str, Any] | None, entry: Mapping[str, Any], blob: memoryview
) -> tuple[dict[str, Any] | list[Any], int]:
    """Return an execution after one record (its sample's fields, or nested lists of fields), and the bytes used.

    Args:
        base: the sample's fields at issue or after an earlier record; None if it was never issued.
        entry: the execution's description in the record's head.
        blob: the record's blob, starting at this execution.
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
    """Make samples from the fields returned by ``apply_entry``."""
    if isinstance(values, list):
        return [to_entry(item) for item in values]
    return Sample.from_dict(values)
