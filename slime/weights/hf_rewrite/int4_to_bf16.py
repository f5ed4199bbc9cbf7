"""Packed integers of compressed-tensors (``pack-quantized``, as Kimi-K2-Thinking has them) back to bf16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from slime.utils.errors import ConfigError, DataError
from slime.weights.hf_rewrite.plan import Piece, Rows, Step, copied, dropped
from slime.weights.hf_rewrite.source import HfSource, shown, without_quantization
from slime.weights.hf_rewrite.tensor_file import StoredTensor, TensorInfo
from slime.weights.quantize.config import read_format
from slime.weights.quantize.formats import GroupInt
from slime.weights.quantize.group_int import WORD_BITS, num_words

PACKED = "weight_packed"
SCALE = "weight_scale"
ZEROS = "weight_zero_point"
SHAPE = "weight_shape"
NUMBERS_PER_WORD = 8


@dataclass(frozen=True)
class Int4ToBf16:
    """The conversion; a :class:`slime.weights.hf_rewrite.plan.Rewrite`."""

    quantization_config: dict[str, Any] | None = None
    """Of the folder's own config.json where None."""

    @property
    def settings(self) -> dict[str, Any]:
        """What makes two conversions differ."""
        return {"to": "bf16", "from": "int4", "quantization_config": self.quantization_config}

    def check(self, source: HfSource) -> None:
        """Refuse what is not packed in four or eight bits, and weights that lack a part.

        Raises:
            ConfigError: the config describes something else.
            DataError: naming what does not fit.
        """
        layout = self._layout(source)
        packed = [name for name in source.tensors if name.endswith("." + PACKED)]
        if not packed:
            raise ConfigError(f"{source.folder} has no tensor called *.{PACKED}; give the quantized model")
        parts = (SCALE, SHAPE) if layout.is_symmetric else (SCALE, SHAPE, ZEROS)
        absent = [
            name.removesuffix(PACKED) + part
            for name in packed
            for part in parts
            if name.removesuffix(PACKED) + part not in source.tensors
        ]
        if absent:
            raise DataError(f"{source.folder} lacks {len(absent)} tensors that belong to others: {shown(absent)}")

    def step(self, source: HfSource, stored: StoredTensor) -> Step:
        """Packed tensors are unpacked and multiplied out, their other parts dropped; the rest is copied."""
        prefix, _, part = stored.info.name.rpartition(".")
        prefix += "."
        if part in (SCALE, ZEROS, SHAPE) and prefix + PACKED in source.tensors:
            return dropped(stored)
        if part != PACKED:
            return copied(stored)
        layout = self._layout(source)
        bits = layout.num_bits
        scale = source.tensors[prefix + SCALE]
        zeros = None if layout.is_symmetric else source.tensors[prefix + ZEROS]
        rows, words_per_row = stored.info.shape
        columns = words_per_row * WORD_BITS // bits
        if layout.group_size is not None:
            columns = layout.group_size * scale.info.shape[1]
        if scale.info.shape[0] != rows or words_per_row != num_words(columns, bits):
            raise DataError(
                f"{scale.info.name} has shape {list(scale.info.shape)}, {stored.info.name} has "
                f"{list(stored.info.shape)}: they do not fit {bits} bits in groups of {layout.group_size}"
            )
        name = prefix + "weight"

        def convert(read: Rows) -> Iterator[Piece]:
            scales = read.read(scale)
            points = None if zeros is None else read.read(zeros)
            for first, words in read.chunks(stored, NUMBERS_PER_WORD):
                count = words.size(0)
                parts = {PACKED: words, SCALE: scales[first : first + count], SHAPE: torch.tensor([count, columns])}
                if points is not None:
                    first_word = first * bits // WORD_BITS
                    parts[ZEROS] = points[first_word : first_word + num_words(count, bits)]
                yield name, first, layout.dequantize(name, parts)

        return Step(stored, (TensorInfo.of(name, torch.bfloat16, (rows, columns)),), convert)

    def config(self, source: HfSource) -> dict[str, Any]:
        """The source's config without quantization."""
        return without_quantization(source.config)

    def _layout(self, source: HfSource) -> GroupInt:
        """How the weights are packed.

        Raises:
            ConfigError: the config does not say, or says something else than packed integers.
        """
        layout = read_format(self.quantization_config or source.quantization_config)
        if not isinstance(layout, GroupInt):
            raise ConfigError(
                f"the config of {source.folder} does not describe packed integers (pack-quantized of "
                "compressed-tensors); --config-path may name another config.json"
            )
        return layout
