"""Group tensors up to a byte limit, so that a push needs a bounded amount of extra memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from slime.utils.errors import ConfigError
from slime.weights.named_tensors import NamedTensors, tensor_bytes


def iter_buckets(named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[NamedTensors]:
    """Consecutive tensors in buckets of at most ``bucket_bytes``; a larger tensor travels alone.

    The order is kept, no tensor is split, no bucket is empty.  Only one bucket is held at a time.

    Args:
        named_tensors: consumed lazily.
        bucket_bytes: the limit; ``--update-weight-buffer-size``.

    Raises:
        ConfigError: the limit is not positive.
    """
    if bucket_bytes <= 0:
        raise ConfigError(f"--update-weight-buffer-size is {bucket_bytes}; it must be a positive number of bytes")
    bucket: NamedTensors = []
    size = 0
    for name, tensor in named_tensors:
        added = tensor_bytes(tensor)
        if bucket and size + added > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += added
    if bucket:
        yield bucket
