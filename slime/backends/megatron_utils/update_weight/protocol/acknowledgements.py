"""Digests of what was sent, and whether what the engines say they hold is that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slime.utils.errors import WeightSyncError
from slime.weights.digest import combine_wrapped
from slime.weights.kernels.tables import DigestTable
from slime.weights.manifest import Manifest

SHOWN_NAMES = 3


class BucketDigests:
    """Digests of this rank's buckets, taken as they pass; nothing waits for the device before :meth:`finish`."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._tables: dict[int, DigestTable] = {}
        self._taken: dict[int, Tensor] = {}
        self._noted: set[int] = set()

    def note(self, index: int, digests: Tensor) -> None:
        """Have the digests of a bucket's pieces from whoever filled it; the next ``take`` of it does nothing."""
        self._taken[index] = digests
        self._noted.add(index)

    def take(self, index: int, flat: Tensor) -> None:
        """Digest the pieces of a bucket; its buffer may be written again by work that is queued behind this."""
        if index in self._noted:
            self._noted.discard(index)
            return
        table = self._tables.get(index)
        if table is None:
            segments = self._manifest.segments(index)
            table = DigestTable([offset for offset, _ in segments], [size for _, size in segments], flat.device)
            self._tables[index] = table
        self._taken[index] = table.run(flat)

    def finish(self) -> dict[int, int]:
        """Digest of each bucket taken since the last time."""
        taken, self._taken = self._taken, {}
        return {index: combine_wrapped(digests) for index, digests in taken.items()}


def check_acknowledgements(
    answers: Mapping[int, Mapping[str, Any]], push_id: str, sent: Mapping[int, int], manifest: Manifest
) -> dict[int, str]:
    """Why engines must be fenced, by their index; none for those that hold just what was sent.

    Args:
        answers: of ``acknowledge_weight_update``, by engine.
        push_id: of this attempt.
        sent: digest of each bucket.
        manifest: of the push.

    Raises:
        WeightSyncError: the trainer did not send some bucket.
    """
    unsent = [index for index in range(len(manifest.buckets)) if index not in sent]
    if unsent:
        raise WeightSyncError(f"no trainer rank sent bucket {unsent[0]} of {len(manifest.buckets)}")
    reasons: dict[int, str] = {}
    for engine, answer in answers.items():
        reason = _find_difference(answer, push_id, sent, manifest)
        if reason is not None:
            reasons[engine] = reason
    return reasons


def _find_difference(
    answer: Mapping[str, Any], push_id: str, sent: Mapping[int, int], manifest: Manifest
) -> str | None:
    if answer["push_id"] != push_id:
        return f"it acknowledged the push {answer['push_id']!r} instead of {push_id!r}"
    if answer["problems"]:
        more = f" (and {len(answer['problems']) - 1} more problems)" if len(answer["problems"]) > 1 else ""
        return f"{answer['problems'][0]}{more}"
    held = answer["buckets"]
    if len(held) != len(manifest.buckets):
        return f"it acknowledged {len(held)} buckets of {len(manifest.buckets)}"
    for index, text in enumerate(held):
        if text != f"{sent[index]:016x}":
            names = ", ".join(part.name for part in manifest.buckets[index].slices[:SHOWN_NAMES])
            what = "nothing" if not text else f"the digest {text}"
            return (
                f"it holds {what} for bucket {index} ({names}, ...), which was sent with the digest {sent[index]:016x}"
            )
    return None
