"""Digests of the segments of a bucket, by one launch: equal to ``slime.weights.digest.digest_bytes`` of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime.weights.digest import MASK_64, as_signed, digest_bytes
from slime.weights.kernels.cast_table import check_bucket


class DigestTable:
    """Digests of the same segments of one bucket after another.

    Args:
        offsets: first byte of each segment; others than multiples of 8 are slow on a GPU.
        lengths: bytes of each segment.
        device: where the buckets lie.
        use_triton: None takes Triton on CUDA; True is for tests of the kernel in Triton's interpreter.

    Raises:
        ValueError: the two lists differ in length, or a number is negative.
    """

    def __init__(
        self,
        offsets: Sequence[int],
        lengths: Sequence[int],
        device: torch.device | str,
        *,
        use_triton: bool | None = None,
    ) -> None:
        if len(offsets) != len(lengths) or min((*offsets, *lengths), default=0) < 0:
            raise ValueError(f"{len(offsets)} offsets and {len(lengths)} lengths; there are as many, none negative")
        self.offsets = list(offsets)
        self.lengths = list(lengths)
        self.device = torch.device(device)
        self.num_bytes = max((begin + length for begin, length in zip(offsets, lengths)), default=0)
        """Bytes that the bucket must have."""
        if use_triton is None:
            use_triton = self.device.type == "cuda"
        self._launch: Any = None
        if use_triton and self.offsets:
            # Triton comes with torch for CUDA only.
            from slime.weights.kernels.triton_digest import DigestLaunch

            self._launch = DigestLaunch(self.offsets, self.lengths, self.device)

    def run(self, flat: Tensor) -> Tensor:
        """Digests of the segments of ``flat`` (flat, uint8) as int64, the unsigned value wrapped; see
        :func:`as_unsigned`.  On a GPU this returns before the work is done.

        Raises:
            ValueError: ``flat`` is too small or not flat bytes.
        """
        check_bucket(flat, self.num_bytes, None)
        if self._launch is not None:
            return self._launch.run(flat)
        values = [digest_bytes(flat[begin : begin + size]) for begin, size in zip(self.offsets, self.lengths)]
        return torch.tensor([as_signed(value) for value in values], dtype=torch.int64, device=flat.device)


def as_unsigned(digests: Tensor) -> list[int]:
    """The digests as ``digest_bytes`` gives them; waits for the device."""
    return [value & MASK_64 for value in digests.tolist()]


def digest_segments(flat: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Digest of each segment of the bucket, as ``digest_bytes`` gives it.

    For segments that come again and again, a :class:`DigestTable` saves the making of the table.

    Raises:
        ValueError: as :class:`DigestTable`.
    """
    return as_unsigned(DigestTable(offsets, lengths, flat.device).run(flat))
