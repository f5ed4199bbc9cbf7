"""SGLang's checks of weights (``/weights_checker``) without CUDA, which they copy to and from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

CHUNK = 1 << 24
"""Elements that are compared at a time."""
HOOKED = {
    "sglang.srt.utils.weight_checker.WeightChecker._snapshot": "snapshot",
    "sglang.srt.utils.weight_checker.select_comparable_weight": "compared_by_value",
    "sglang.srt.utils.weight_checker_comparator.RawComparable.iter_chunks": "chunks",
}
"""Function of SGLang -> the one here that is called in its place, with it in front."""


def snapshot(original: Callable[..., None], checker: Any) -> None:
    """Keep copies: of a tensor in the host's memory, ``cpu()`` is the tensor itself."""
    original(checker)
    checker._snapshot_tensors = {name: tensor.clone() for name, tensor in checker._snapshot_tensors.items()}


def compared_by_value(original: Callable[..., Any], quant_method: Any) -> None:
    """Have every weight compared as it is stored; SGLang dequantizes on a GPU."""


def chunks(original: Callable[..., Any], weight: Any) -> Iterator[tuple[Tensor, None]]:
    """Yield the parts of a tensor where it is."""
    for chunk in weight.tensor.reshape(-1).split(CHUNK):
        yield chunk, None
