"""Samples as bytes, and back: per-token lists packed, all else encoded field by field, unchanged fields left out.

``snapshot`` holds an execution on the event loop: it copies references only, except for what our own code changes in
place.  ``EntryEncoder`` runs on the writer's thread; it remembers what it wrote of an execution and writes the fields
that have changed.  ``apply_entry`` is the way back.

Token ids are int32, masks one byte, log-probs float32 (as the engine computed them).  Objects of classes (a client, a
lock that a hook attached) are left out, with a line in the log.
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
    """The packing of a list of numbers, or of a text."""

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
"""Have an item for each token of the response."""
LISTS_OF_NUMBERS = ("tokens", *GROWING, "teacher_log_probs")
PACK_ERRORS = (struct.error, TypeError, ValueError, OverflowError, UnicodeError)

DEFAULTS = Sample().to_dict()
"""The base of an execution that was never issued."""


class Snapshot(NamedTuple):
    """A sample at one moment."""

    values: dict[str, Any]
    num_tokens: int


class Snapshots(NamedTuple):
    """The samples of an execution, and their nesting."""

    samples: list[Snapshot]
    shape: Any
    """0 for a single Sample; else a nested list of sample positions."""


def snapshot(entry: Sample | list[Any], *, copy_lists: bool = False) -> Snapshots:
    """Return an execution as it is now.

    Args:
        entry: a Sample, or samples nested in lists.
        copy_lists: whether user code may change lists in place before they are written.  Our own code only replaces
            or extends them.
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
    """Return the fields of a sample as it is issued; its lists of numbers are copied, because they grow in place."""
    values = _snapshot_sample(sample, copy_lists=False).values
    return values | {name: values[name].copy() for name in LISTS_OF_NUMBERS if type(values.get(name)) is list}


def _snapshot_sample(sample: Sample, copy_lists: bool) -> Snapshot:
    values = sample.__dict__.copy()
    num_tokens = len(sample.tokens)
    # Our own code changes these in place, and the writer comes to them later.
    values["status"] = sample.status.value
    values["weight_versions"] = sample.weight_versions[:]
    values["metadata"] = (sample.metadata or {}).copy()  # None where a data source leaves it out
    values["prefix_cache_info"] = sample.prefix_cache_info.to_dict()
    values["spec_info"] = sample.spec_info.to_dict()
    if copy_lists:
        for name, value in values.items():
            if type(value) is list or type(value) is dict:
                values[name] = value.copy()
    return Snapshot(values, num_tokens)


TRANSIENT = ("trace",)
"""Of the rollout in progress; not part of the sample."""

_DATA_FIELDS = frozenset({"prompt", "label", "multimodal_inputs", "apply_chat_template_kwargs"})
"""From the data row: written only when they are other objects than at the issue."""
_PLAIN = frozenset({str, int, float, bool, type(None)})
_MISSING = object()


class _Known(NamedTuple):
    """The last written state of a packed field: the object, its length then, and the digest of its bytes."""

    value: Any
    num_items: int
    digest: int


class EntryEncoder:
    """The encoder of the executions of open groups; one for the writer's thread.

    Invariant: ``apply_leaf`` on the sample as it was issued, with everything this object wrote of it in order, gives
    the sample as it was at the last snapshot.
    """

    def __init__(self) -> None:
        self._known: dict[Any, dict[str, Any]] = {}

    def forget(self, keys: Iterable[Any] | None) -> None:
        """Forget these executions; None: all of them."""
        if keys is None:
            self._known.clear()
        for key in keys or ():
            self._known.pop(key, None)

    def encode(
        self, key: Any, leaves: Snapshots, issued: dict[str, Any] | None, *, trusts_lists: bool = False
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Return the description (for the head) and the bytes of what changed in an execution.

        Args:
            key: names the execution.
            leaves: the execution now.
            issued: the fields of its sample when it was issued; None writes everything.
            trusts_lists: no user code has seen the execution since its last record, so a list that is the same object
                has the same items.
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
            with contextlib.suppress(*PACK_ERRORS):  # then it is encoded, like anything that is no number
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
    """Return the length of a packed field at the moment of the snapshot; lists may have grown since."""
    if name == "tokens":
        return leaf.num_tokens
    value = leaf.values[name]
    return min(len(value), leaf.values["response_length"]) if name in GROWING else len(value)


def _summary(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a sample for the head."""
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
    """Return the fields of a sample after one record (``Sample.to_dict``), and the bytes of ``blob`` used.

    Applying records twice, or to a later state of the same sample, gives the same.
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
    """Return an execution after one record (fields of its sample, or nested lists of such), and the bytes used.

    Args:
        base: the fields of the sample as issued, or as an earlier record left them; None when it was never issued.
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
    """Return samples from the fields that ``apply_entry`` returned."""
    if isinstance(values, list):
        return [to_entry(item) for item in values]
    return Sample.from_dict(values)
