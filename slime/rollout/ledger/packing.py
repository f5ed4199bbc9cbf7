"""Samples as bytes: per-token lists packed, everything else pickled field by field, unchanged fields left out.

``EntryEncoder`` runs on the writer's thread; it knows what it wrote of an execution before and writes what is new: a
response that goes on costs its new tokens.  ``unpacking`` is the way back.

Fields of a sample that cannot be pickled (a client, a lock that a hook attached) are left out, with a line in the log.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import xxhash

from slime.rollout.ledger.packed_fields import PACK_ERRORS, PACKED, Packing
from slime.rollout.ledger.records import encode_value
from slime.rollout.ledger.snapshots import DEFAULTS, Leaves, PackedNow, Snapshot

logger = logging.getLogger(__name__)

TRANSIENT = ("hooks_are_due", "recovered_in_rollout", "trace")
"""Marks that recovery sets for the rollout in progress; they are nobody's property."""

_DATA_FIELDS = frozenset({"prompt", "label", "multimodal_inputs", "apply_chat_template_kwargs"})
"""From the data row: written only when they are other objects than at the issue."""
_COPIED = frozenset({"weight_versions", "prefix_cache_info", "spec_info"})
"""Copied by every snapshot, so that two snapshots can be compared."""
_CONTAINERS = frozenset({"metadata", "tokens", "loss_mask", "rollout_log_probs"})
_PLAIN = frozenset({str, int, float, bool, type(None)})
_MISSING = object()


class _Known(NamedTuple):
    """What was written last of a packed field: the object, how much of it, and the digest of its bytes."""

    value: Any
    num_items: int
    num_bytes: int
    digest: int


class EntryEncoder:
    """Encodes the executions of open groups; one for the writer's thread.

    Invariant: ``unpacking.apply_leaf`` on the sample as it was issued, with everything this object wrote of it in
    order, gives the sample as it was when the last of it was taken.
    """

    def __init__(self, *, trust_identity: bool) -> None:
        self._trust_identity = self._is_settled = trust_identity
        self._comparable = _COPIED | _CONTAINERS if trust_identity else _COPIED
        self._known: dict[Any, dict[str, Any]] = {}
        self._left_out: set[str] = set()

    def forget(self, keys: Iterable[Any] | None = None) -> None:
        """Drop what is known of these executions; of all of them without ``keys``."""
        if keys is None:
            self._known.clear()
            return
        for key in keys:
            self._known.pop(key, None)

    def encode(
        self, key: Any, leaves: Leaves, issued: dict[str, Any] | None, *, is_settled: bool = False
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Description (for the head) and bytes of what changed in an execution.

        Args:
            key: names the execution.
            leaves: the execution now.
            issued: the fields of its sample when it was issued; None writes everything.
            is_settled: no user code has seen the execution since its last record, so a list that is the same object
                has the same items.
        """
        self._is_settled = is_settled or self._trust_identity
        is_single = leaves.shape == 0
        chunks: list[bytes] = []
        described = []
        for position, leaf in enumerate(leaves.samples):
            if is_single and key is not None:
                if key not in self._known:
                    self._known[key] = dict(issued or DEFAULTS)
                known = self._known[key]
            else:
                known = dict(DEFAULTS)
            described.append(self._encode_leaf(leaf, known, issued if is_single else None, chunks))
            if position == 0 and not is_single:
                self.forget([key])
        return {"shape": leaves.shape, "leaves": described}, chunks

    def _encode_leaf(
        self, leaf: Snapshot, known: dict[str, Any], issued: dict[str, Any] | None, chunks: list[bytes]
    ) -> dict[str, Any]:
        packed: list[list[Any]] = []
        small: dict[str, Any] = {}
        pickled: dict[str, bytes] = {}
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
            data = self._pickle(name, value)
            if data is not None and data != earlier:
                pickled[name] = known[name] = data
        gone: list[str] = []
        if not values.keys() >= known.keys():
            gone = [name for name in known if name not in values]
            for name in gone:
                del known[name]
        data = _encode_rest(small, pickled, gone) if small or pickled or gone else b""
        chunks.append(data)
        return _summary(values) | {"packed": packed, "rest": len(data)}

    def _encode_packed(
        self, name: str, value: Any, num_items: int, earlier: Any, packed: list[list[Any]], chunks: list[bytes]
    ) -> _Known | None:
        """Write what is new of a packed field; None when it holds something that the packing cannot hold."""
        packing = PACKED[name]
        data: bytes | None = None
        if type(value) is PackedNow:
            value, data = value
            num_items = len(data) // packing.width
        if type(earlier) is not _Known:
            is_same = value is earlier and self._is_settled and len(value) == num_items
            earlier = self._digest(packing, earlier)
            if is_same and earlier is not None:
                return earlier
        elif value is earlier.value and num_items == earlier.num_items and self._is_settled:
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

    def _pickle(self, name: str, value: Any) -> bytes | None:
        data = try_pickle(value)
        if data is None and name not in self._left_out:
            self._left_out.add(name)
            logger.warning(
                "The ledger leaves Sample.%s out: a %s cannot be pickled. Recovered samples will not have it.",
                name,
                type(value).__name__,
            )
        return data


def _length(name: str, leaf: Snapshot) -> int:
    """How many items of a packed field belong to the moment of the snapshot; lists may have grown since."""
    if name == "tokens":
        return leaf.num_tokens
    value = leaf.values[name]
    if type(value) is PackedNow:
        value = value.value
    if name in ("loss_mask", "rollout_log_probs"):
        return min(len(value), leaf.values["response_length"])
    return len(value)


def _encode_rest(small: dict[str, Any], pickled: dict[str, bytes], gone: list[str]) -> bytes:
    try:
        return encode_value([small, pickled, gone])
    except (OverflowError, TypeError, ValueError):  # an integer beyond 64 bits, a text with lone surrogates
        as_pickles = {name: pickle.dumps(value) for name, value in small.items()}
        return encode_value([{}, pickled | as_pickles, gone])


def try_pickle(value: Any, *, attempts: int = 3) -> bytes | None:
    """The pickled value; None when it cannot be pickled.  A dict that another thread fills is tried again."""
    for _ in range(attempts):
        try:
            return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        except RuntimeError:
            continue
        except Exception:  # Anything may be raised: the objects are the user's.
            return None
    return None


def _summary(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the head says of a sample."""
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
