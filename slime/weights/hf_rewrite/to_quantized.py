"""Plain weights into a format of ``slime.weights.quantize.formats``: FP8 or packed integers.

The maths is that of the weights that a trainer pushes, so that both give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from slime.utils.errors import ConfigError
from slime.weights.hf_rewrite.plan import Piece, Rows, Step, copied
from slime.weights.hf_rewrite.source import HfSource, shown
from slime.weights.hf_rewrite.tensor_file import StoredTensor, TensorInfo
from slime.weights.quantize.formats import WeightFormat

QUANTIZABLE = ("BF16", "F16", "F32")
SHAPE_PART = "weight_shape"


@dataclass(frozen=True)
class ToQuantized:
    """The conversion; a :class:`slime.weights.hf_rewrite.plan.Rewrite`."""

    format: WeightFormat
    row_multiple: int | None
    """Rows of a weight that can be quantized without the others are multiples of this; None: only all of them."""
    is_quantized: Callable[[str, tuple[int, ...]], bool]
    """By name and shape."""
    quantization_config: Callable[[Collection[str]], dict[str, Any]]
    """What config.json says of it, given the names of all tensors of the source."""
    settings: dict[str, Any]
    """What makes two conversions differ."""

    def check(self, source: HfSource) -> None:
        """Refuse sources that are quantized, or hold nothing to quantize.

        Raises:
            ConfigError: naming the tensors.
        """
        require_plain(source)
        chosen = [name for name, stored in source.tensors.items() if self.is_quantized(name, stored.info.shape)]
        wrong = [name for name in chosen if source.info(name).dtype not in QUANTIZABLE]
        if wrong:
            raise ConfigError(
                f"{len(wrong)} weights to be quantized have other dtypes than {', '.join(QUANTIZABLE)}, such as "
                f"{source.info(wrong[0]).dtype}: {shown(wrong)}; give the unquantized checkpoint"
            )
        if not chosen:
            raise ConfigError(f"nothing in {source.folder} would be quantized; no name and shape fits the rules")

    def step(self, source: HfSource, stored: StoredTensor) -> Step:
        """The weights of linear layers are quantized, everything else is copied."""
        info = stored.info
        if not self.is_quantized(info.name, info.shape):
            return copied(stored)
        prefix = info.name.removesuffix("weight")
        parts = self.format.outputs(info.name, info.shape)
        outputs = tuple(TensorInfo.of(prefix + part, dtype, shape) for part, (shape, dtype) in parts.items())
        if self.row_multiple is None:
            return Step(stored, outputs, lambda rows: self._whole(rows, stored, prefix))
        return Step(stored, outputs, lambda rows: self._by_rows(rows, stored, prefix))

    def config(self, source: HfSource) -> dict[str, Any]:
        """The source's config with the quantization config of the result."""
        return {**source.config, "quantization_config": self.quantization_config(source.tensors)}

    def _whole(self, rows: Rows, stored: StoredTensor, prefix: str) -> Iterator[Piece]:
        parts = self.format.quantize(stored.info.name, rows.read(stored), check_finite=True)
        yield from ((prefix + part, 0, tensor) for part, tensor in parts.items())

    def _by_rows(self, rows: Rows, stored: StoredTensor, prefix: str) -> Iterator[Piece]:
        info = stored.info
        multiple = self.row_multiple or 1
        # Rows that each part has for so many rows of the weight.
        per_multiple = {
            part: shape[0] for part, (shape, _) in self.format.outputs(info.name, (multiple, *info.shape[1:])).items()
        }
        for first, weight in rows.chunks(stored, multiple):
            for part, tensor in self.format.quantize(info.name, weight, check_finite=True).items():
                if part != SHAPE_PART:
                    yield prefix + part, first // multiple * per_multiple[part], tensor
        if SHAPE_PART in per_multiple:
            yield prefix + SHAPE_PART, 0, torch.tensor(info.shape, dtype=torch.int32)


def require_plain(source: HfSource) -> None:
    """Refuse a checkpoint that is quantized already.

    Raises:
        ConfigError: naming its method.
    """
    found = source.quantization_config
    if found:
        raise ConfigError(
            f"{source.folder} is quantized already ({found.get('quant_method', 'by an unnamed method')}); give the "
            "unquantized model, or make one with tools/fp8_cast_bf16.py"
        )
