"""Computes digests of what is sent and compares them with the engines' acknowledgements."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from slime.ext.fast_push.carrier import NO_BUCKET, BucketSource
from slime.ext.fast_push.kernels.tables import DigestTable
from slime.ext.fast_push.manifest import Manifest, TensorEntry
from slime.utils.errors import WeightSyncError
from slime.weights.digest import combine_wrapped

SHOWN_NAMES = 3


class DigestedBuckets:
    """A bucket source that digests buckets as they pass; nothing synchronizes with the device before :meth:`digests`.

    Args:
        source: the source to wrap.
        kept: tensors that are not pushed and that engines keep unchanged.
    """

    def __init__(self, source: BucketSource, kept: tuple[TensorEntry, ...] = ()) -> None:
        self.source = source
        self.constant_digests: dict[int, int] = {}
        """See ``Buckets.constant_digests``."""
        self._kept = kept
        self._tables: dict[int, DigestTable] = {}
        self._taken: dict[int, Tensor] = {}
        self._recorded: set[int] = set()

    @functools.cached_property
    def manifest(self) -> Manifest:
        manifest = self.source.manifest
        return dataclasses.replace(manifest, kept=self._kept) if self._kept else manifest

    def iter_buckets(self, *, with_constants: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Yield the source's buckets.  Work queued after a bucket's digest may overwrite its buffer."""
        for index, flat in self.source.iter_buckets(with_constants=with_constants):
            if index != NO_BUCKET:
                self._take(index, flat)
            yield index, flat

    def record(self, index: int, digests: Tensor) -> None:
        """Take the digests of a bucket's slices from the source, which computed them while it filled the bucket."""
        self._taken[index] = digests
        self._recorded.add(index)

    def _take(self, index: int, flat: Tensor) -> None:
        if index in self._recorded:
            self._recorded.discard(index)
            return
        table = self._tables.get(index)
        if table is None:
            segments = self.manifest.segments(index)
            table = DigestTable([offset for offset, _ in segments], [size for _, size in segments], flat.device)
            self._tables[index] = table
        self._taken[index] = table.run(flat)

    def digests(self) -> dict[int, int]:
        taken, self._taken = self._taken, {}
        found = {index: combine_wrapped(digests) for index, digests in taken.items()}
        self.constant_digests |= {index: found[index] for index in self.manifest.constants if index in found}
        return self.constant_digests | found


def check_acknowledgements(
    answers: Mapping[int, Mapping[str, Any]], push_id: str, sent: Mapping[int, int], manifest: Manifest
) -> dict[int, str]:
    """Return engine index -> reason, for engines to exclude because they do not hold exactly what was sent.

    Args:
        answers: engine index -> answer to ``acknowledge_weight_update``.
        push_id: the attempt to which they must belong.
        sent: bucket index -> digest of what was sent.
        manifest: the push's manifest.

    Raises:
        WeightSyncError: no trainer rank sent some bucket.
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
