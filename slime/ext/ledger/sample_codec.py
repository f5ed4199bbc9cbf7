"""Samples as bytes, and back: per-token lists packed, all else encoded field by field, unchanged fields left out.

``snapshot`` holds an execution on the event loop: it copies references only, except for what our own code changes in
place.  ``EntryEncoder`` runs on the writer's thread; it remembers what it wrote of an execution and writes what is
new, so a response that continues costs its new tokens.  ``apply_entry`` is the way back.

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
from slime.utils.errors import DataError
from slime.utils.types import Sample


def _pack_ints(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _pack_floats(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


class Packing(NamedTuple):
    """The packing of a list of numbers, or of a text."""

    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]
    width: int


def _unpacker(code: str, width: int) -> Callable[[bytes], list[Any]]:
    return lambda data: list(struct.unpack(f"<{len(data) // width}{code}", data))


PACKED = {
    "tokens": Packing(_pack_ints, _unpacker("i", 4), 4),
    "rollout_log_probs": Packing(_pack_floats, _unpacker("f", 4), 4),
    "teacher_log_probs": Packing(_pack_floats, _unpacker("f", 4), 4),
    "loss_mask": Packing(bytes, list, 1),
    "response": Packing(str.encode, bytes.decode, 1),
}
LISTS_OF_NUMBERS = ("tokens", "rollout_log_probs", "loss_mask", "teacher_log_probs")
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


class PackedNow(NamedTuple):
    """A list of numbers, packed at the moment of the snapshot."""

    value: list[Any]
    data: bytes


def snapshot(entry: Sample | list[Any], *, copy_lists: bool = False, pack_now: bool = False) -> Snapshots:
    """Return an execution as it is now.

    Args:
        entry: a Sample, or samples nested in lists.
        copy_lists: whether user code may change lists in place before they are written.  Our own code only replaces
            or extends them.
        pack_now: pack tokens, log-probs and mask at once.  An answer that has just been parsed is in the caches of
            this core; for the writer's thread each number is a fetch from another core's.
    """
    if isinstance(entry, Sample):
        return Snapshots([_snapshot_sample(entry, copy_lists, pack_now)], 0)
    samples: list[Snapshot] = []

    def shape_of(item: Any) -> Any:
        if isinstance(item, Sample):
            samples.append(_snapshot_sample(item, copy_lists, pack_now))
            return len(samples) - 1
        return [shape_of(part) for part in item]

    return Snapshots(samples, shape_of(entry))


def issued_fields(sample: Sample) -> dict[str, Any]:
    """Return the fields of a sample as it is issued; its lists of numbers are copied, because they grow in place."""
    values = _snapshot_sample(sample, copy_lists=False, pack_now=False).values
    return values | {name: values[name].copy() for name in LISTS_OF_NUMBERS if type(values.get(name)) is list}


def _snapshot_sample(sample: Sample, copy_lists: bool, pack_now: bool) -> Snapshot:
    values = sample.__dict__.copy()
    num_tokens = len(sample.tokens)
    # Our own code changes these in place, and the writer comes to them later.
    values["status"] = sample.status.value
    values["weight_versions"] = sample.weight_versions[:]
    values["metadata"] = (sample.metadata or {}).copy()  # None where a data source leaves it out
    values["prefix_cache_info"] = sample.prefix_cache_info.to_dict()
    values["spec_info"] = sample.spec_info.to_dict()
    if pack_now:
        for name in LISTS_OF_NUMBERS:
            value = values.get(name)
            if type(value) is list and value:
                with contextlib.suppress(*PACK_ERRORS):  # then it is encoded, like anything that is no number
                    values[name] = PackedNow(value, PACKED[name].pack(value))
    if copy_lists:
        for name, value in values.items():
            if type(value) is list or type(value) is dict:
                values[name] = value.copy()
    return Snapshot(values, num_tokens)


TRANSIENT = ("trace",)
"""Of the rollout in progress; not part of the sample."""

_DATA_FIELDS = frozenset({"prompt", "label", "multimodal_inputs", "apply_chat_template_kwargs"})
"""From the data row: written only when they are other objects than at the issue."""
_COPIED = frozenset({"weight_versions", "prefix_cache_info", "spec_info"})
"""Copied by every snapshot, so that two snapshots can be compared."""
_CONTAINERS = frozenset({"metadata", "tokens", "loss_mask", "rollout_log_probs"})
_PLAIN = frozenset({str, int, float, bool, type(None)})
_MISSING = object()


class _Known(NamedTuple):
    """The last written state of a packed field: the object, its length then, and the digest of its bytes."""

    value: Any
    num_items: int
    num_bytes: int
    digest: int


class EntryEncoder:
    """The encoder of the executions of open groups; one for the writer's thread.

    Invariant: ``apply_leaf`` on the sample as it was issued, with everything this object wrote of it in order, gives
    the sample as it was at the last snapshot.
    """

    def __init__(self, *, trust_identity: bool) -> None:
        self._trust_identity = self._is_final = trust_identity
        self._comparable = _COPIED | _CONTAINERS if trust_identity else _COPIED
        self._known: dict[Any, dict[str, Any]] = {}

    def forget(self, keys: Iterable[Any] | None) -> None:
        """Forget these executions; None: all of them."""
        if keys is None:
            self._known.clear()
        for key in keys or ():
            self._known.pop(key, None)

    def encode(
        self, key: Any, leaves: Snapshots, issued: dict[str, Any] | None, *, is_final: bool = False
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Return the description (for the head) and the bytes of what changed in an execution.

        Args:
            key: names the execution.
            leaves: the execution now.
            issued: the fields of its sample when it was issued; None writes everything.
            is_final: no user code has seen the execution since its last record, so a list that is the same object
                has the same items.
        """
        self._is_final = is_final or self._trust_identity
        chunks: list[bytes] = []
        described = []
        if leaves.shape != 0:  # a fan-out is written whole
            self.forget([key])
            key = issued = None
        for leaf in leaves.samples:
            known = self._known.get(key) or dict(issued or DEFAULTS)
            if key is not None:
                self._known[key] = known
            described.append(self._encode_leaf(leaf, known, issued, chunks))
        return {"shape": leaves.shape, "leaves": described}, chunks

    def _encode_leaf(
        self, leaf: Snapshot, known: dict[str, Any], issued: dict[str, Any] | None, chunks: list[bytes]
    ) -> dict[str, Any]:
        packed: list[list[Any]] = []
        small: dict[str, Any] = {}
        encoded: dict[str, bytes] = {}
        values = leaf.values
        for name, value in values.items():
            earlier = known.get(name, _MISSING)
            if value is earlier and type(value) in _PLAIN or name in TRANSIENT:
                continue
            if issued is not None and name in _DATA_FIELDS and value is issued.get(name, _MISSING):
                continue
            if name in PACKED and type(value) in (list, str, PackedNow) and len(value) > 0:
                done = self._encode_packed(name, value, _length(name, leaf), earlier, packed, chunks)
                if done is not None:
                    known[name] = done
                    continue
            if type(value) in _PLAIN:
                if not (type(earlier) is type(value) and earlier == value):
                    small[name] = known[name] = value
                continue
            if name in self._comparable and type(value) is type(earlier) and value == earlier:
                continue
            data = _encode_field(name, value)
            if data is not None and data != earlier:
                encoded[name] = known[name] = data
        gone = [] if values.keys() >= known.keys() else [name for name in known if name not in values]
        for name in gone:
            del known[name]
        data = _encode_rest(small, encoded, gone) if small or encoded or gone else b""
        chunks.append(data)
        return _summary(values) | {"packed": packed, "rest": len(data)}

    def _encode_packed(
        self, name: str, value: Any, num_items: int, earlier: Any, packed: list[list[Any]], chunks: list[bytes]
    ) -> _Known | None:
        """Append the new part of a packed field; return None when the packing cannot hold its values."""
        packing = PACKED[name]
        data: bytes | None = None
        if type(value) is PackedNow:
            value, data = value
            num_items = len(data) // packing.width
        if type(earlier) is not _Known:
            is_same = value is earlier and self._is_final and len(value) == num_items
            earlier = self._digest(packing, earlier)
            if is_same and earlier is not None:
                return earlier
        elif value is earlier.value and num_items == earlier.num_items and self._is_final:
            return earlier
        if data is None:
            try:
                data = packing.pack(value if len(value) == num_items else value[:num_items])
            except PACK_ERRORS:
                return None
        digest = xxhash.xxh3_64_intdigest(data)
        start = 0
        if earlier is not None and earlier.num_bytes <= len(data):
            if earlier.num_bytes == len(data) and earlier.digest == digest:
                return _Known(value, num_items, len(data), digest)
            if earlier.num_bytes and xxhash.xxh3_64_intdigest(data[: earlier.num_bytes]) == earlier.digest:
                start = earlier.num_bytes
        packed.append([name, start, len(data) - start])
        chunks.append(data[start:] if start else data)
        return _Known(value, num_items, len(data), digest)

    @staticmethod
    def _digest(packing: Packing, value: Any) -> _Known | None:
        if type(value) not in (list, str) or not value:
            return None
        try:
            data = packing.pack(value)
        except PACK_ERRORS:
            return None
        return _Known(value, len(value), len(data), xxhash.xxh3_64_intdigest(data))


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
    if type(value) is PackedNow:
        value = value.value
    if name in ("loss_mask", "rollout_log_probs"):
        return min(len(value), leaf.values["response_length"])
    return len(value)


def _encode_rest(small: dict[str, Any], encoded: dict[str, bytes], gone: list[str]) -> bytes:
    try:
        return encode_value([small, encoded, gone])
    except (OverflowError, TypeError, ValueError):  # an integer beyond 64 bits, a text with lone surrogates
        return encode_value([{}, encoded | {name: plain_values.dumps(value) for name, value in small.items()}, gone])


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
        small, encoded, gone = decode_value(blob[offset : offset + leaf["rest"]])
        offset += leaf["rest"]
        for name in gone:
            values.pop(name, None)
        values |= small
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
