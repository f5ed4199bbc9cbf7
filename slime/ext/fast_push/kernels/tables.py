"""Lists of small operations on a bucket, each list made once and run again by every push in one launch.

CastTable     live parameters -> a flat bucket: copied, cast or quantized
CopyTable     a flat bucket -> an engine's parameters, and the comparison of both
DigestTable   64-bit digests of segments of a bucket: those of ``slime.weights.digest.digest_bytes``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime.ext.fast_push.kernels.table_items import (
    CastItem,
    CopyItem,
    check_bucket,
    check_cast,
    check_copy,
    differing_bytes,
    run_in_torch,
    source_view,
)
from slime.weights.digest import MASK_64, as_signed, digest_bytes
from slime.weights.quantize.block_fp8 import DEFAULT_BLOCK


class CastTable:
    """Writes its items into a bucket, as often as wanted.

    Args:
        items: of parameters on one device, or in pinned host memory.
        out_dtype: of the items that are cast.
        block: rows and columns that share a scale.
        use_triton: None takes Triton for CUDA tensors; True is for tests of the kernels in Triton's interpreter.
        device: of the bucket; None for that of the items.  A GPU reads pinned host memory over the bus.
        segments: offset and bytes of what :meth:`run_with_digests` gives digests of; None for every matrix and every
            array of scales, in the order of the items.

    Raises:
        ValueError: an item does not fit its source, its offsets are not aligned, or devices differ.
    """

    def __init__(
        self,
        items: Sequence[CastItem],
        out_dtype: torch.dtype,
        block: tuple[int, int] = DEFAULT_BLOCK,
        *,
        use_triton: bool | None = None,
        device: torch.device | None = None,
        segments: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.items = tuple(items)
        self.out_dtype = out_dtype
        self.block = block
        for index, item in enumerate(self.items):
            check_cast(index, item, out_dtype)
        devices = {item.source.device for item in self.items}
        if len(devices) > 1:
            raise ValueError(f"the items of one table lie on {sorted(map(str, devices))}; one table, one device")
        self.device = device or (devices.pop() if devices else None)
        for index, item in enumerate(self.items):
            source = item.source
            if source.device != self.device and not (source.device.type == "cpu" and source.is_pinned()):
                raise ValueError(
                    f"item {index} is on {source.device}, which {self.device} cannot read; only host memory that is "
                    "pinned can be read from there"
                )
        own = [segment for item in self.items for segment in item.segments(out_dtype, block)]
        self.segments = own if segments is None else list(segments)
        self.num_bytes = max((offset + size for offset, size in (*own, *self.segments)), default=0)
        """Bytes that the bucket must have."""
        self.bytes_read = sum(item.rows * item.columns * item.source.element_size() for item in self.items)
        self.bytes_written = sum(size for _, size in own)

        if use_triton is None:
            use_triton = self.device is not None and self.device.type == "cuda"
        self._launch: Any = None
        if use_triton and self.items:
            # Triton comes with torch for CUDA only.
            from slime.ext.fast_push.kernels.triton_cast import CastLaunch

            self._launch = CastLaunch(self.items, out_dtype, block, self.segments, device=self.device)

    def run(self, out: Tensor) -> None:
        """Fill the bucket ``out`` (flat, uint8, at least :attr:`num_bytes`) from what the parameters hold now.

        Bytes between the items are left as they are.  On a GPU this returns before the work is done.

        Raises:
            ValueError: ``out`` is too small, not flat bytes, or on another device.
        """
        check_bucket(out, self.num_bytes, self.device)
        if self._launch is not None:
            self._launch.run(out)
            return
        for item in self.items:
            run_in_torch(item, out, self.out_dtype, self.block)

    def run_with_digests(self, out: Tensor) -> Tensor:
        """Run, and return the digests of the :attr:`segments` as ``DigestTable`` would, at less than its cost.

        Returns:
            int64 ``[segments]``, the unsigned values wrapped (:func:`as_unsigned`).

        Raises:
            ValueError: as :meth:`run`.
        """
        check_bucket(out, self.num_bytes, self.device)
        if self._launch is not None:
            return self._launch.run_with_digests(out)
        self.run(out)
        digests = [digest_bytes(out[offset : offset + size]) for offset, size in self.segments]
        return torch.tensor([as_signed(digest) for digest in digests], dtype=torch.int64, device=out.device)


class CopyTable:
    """Copies a bucket into its items, or compares them with it, as often as wanted.

    Args:
        items: destinations on one device; no element is in two of them.
        use_triton: None takes Triton for CUDA tensors; True is for tests of the kernels in Triton's interpreter.

    Raises:
        ValueError: strides and dimensions of an item differ in number, an offset is not aligned, or devices differ.
    """

    def __init__(self, items: Sequence[CopyItem], *, use_triton: bool | None = None) -> None:
        self.items = tuple(items)
        for index, item in enumerate(self.items):
            check_copy(index, item)
        devices = {item.dst.device for item in self.items}
        if len(devices) > 1:
            raise ValueError(f"the items of one table lie on {sorted(map(str, devices))}; one table, one device")
        self.device = devices.pop() if devices else None
        self.num_bytes = max((item.end for item in self.items), default=0)
        """Bytes that the bucket must have."""
        self.bytes_read = sum(item.dst.numel() * item.src_dtype.itemsize for item in self.items)
        self.bytes_written = sum(item.dst.numel() * item.dst.element_size() for item in self.items)

        if use_triton is None:
            use_triton = self.device is not None and self.device.type == "cuda"
        self._launch: Any = None
        if use_triton and self.items:
            # Triton comes with torch for CUDA only.
            from slime.ext.fast_push.kernels.triton_copy import CopyLaunch

            self._launch = CopyLaunch(self.items)

    def copy(self, flat: Tensor) -> None:
        """Write every item from the bucket ``flat`` (flat, uint8).

        The bucket may lie in the memory of another GPU that this one can reach.  On a GPU this returns before the work
        is done.

        Raises:
            ValueError: ``flat`` is too small or not flat bytes.
        """
        check_bucket(flat, self.num_bytes, None)
        if self._launch is not None:
            self._launch.copy(flat)
            return
        for item in self.items:
            item.dst.detach().copy_(source_view(item, flat))

    def count_differences(self, flat: Tensor) -> Tensor:
        """Count the bytes of each destination that differ from those :meth:`copy` would write.

        Returns:
            int64 ``[items]`` on the device of the destinations; on a GPU before the work is done.

        Raises:
            ValueError: as :meth:`copy`.
        """
        check_bucket(flat, self.num_bytes, None)
        if self._launch is not None:
            return self._launch.count_differences(flat)
        counts = torch.zeros(len(self.items), dtype=torch.int64, device=self.device)
        for index, item in enumerate(self.items):
            counts[index] = differing_bytes(item, flat)
        return counts


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
            from slime.ext.fast_push.kernels.triton_digest import DigestLaunch

            self._launch = DigestLaunch(self.offsets, self.lengths, self.device)

    def run(self, flat: Tensor) -> Tensor:
        """Return digests of the segments of ``flat`` (flat, uint8) as int64, the unsigned value wrapped; see
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
    """Return the digests as ``digest_bytes`` gives them; waits for the device."""
    return [value & MASK_64 for value in digests.tolist()]
