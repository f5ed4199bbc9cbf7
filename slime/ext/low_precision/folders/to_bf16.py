"""Quantized weights back to bf16: FP8 with scales by blocks, channels or tensors, packed integers, MXFP4; FP8 with
experts in FP4 (DeepSeek-V4).

A weight and its scale may lie in different shards.  What is left has no trace of quantization: scales are dropped,
and so is the quantization config, by which an engine would look for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.ext.low_precision.folders.plan import HfSource, OutputRows, TensorPlan, copied, dropped, shown
from slime.ext.low_precision.folders.tensor_file import RowReader
from slime.utils.errors import ConfigError, DataError
from slime.weights.hf_files import without_quantization
from slime.weights.quantize.block_fp8 import DEFAULT_BLOCK, dequantize_block, num_blocks
from slime.weights.quantize.formats import E8M0, FP8_CODES, SCALE_NAMES, GroupInt, scale_of
from slime.weights.quantize.group_int import WORD_BITS, num_words
from slime.weights.quantize.mxfp4 import (
    BLOCKS,
    FP4_CODES,
    GROUP,
    NUMBERS_PER_BYTE,
    SCALES,
    dequantize,
    multiply_out,
)
from slime.weights.quantize.quantizer import read_format
from slime.weights.stored_tensors import TORCH_DTYPES, StoredTensor, TensorInfo, read_bytes

SCALE_CODES = ("F32", "BF16", "F16", E8M0)
ACTIVATION_SCALES = (".input_scale", ".activation_scale")
EXPERT_DTYPE = "expert_dtype"
"""Key of config.json: experts are ``fp4``."""


class _ToBf16:
    """What every conversion of this file says of itself."""

    kind: str
    """Of the source."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that distinguish two conversions."""
        return {"to": "bf16", "from": self.kind}

    def config(self, source: HfSource) -> dict[str, Any]:
        """Return the source's config without quantization."""
        return without_quantization(source.config)


class Fp8ToBf16(_ToBf16):
    """The conversion; a :class:`slime.ext.low_precision.folders.plan.Rewrite`."""

    kind = "fp8"

    def check(self, source: HfSource) -> None:
        """Refuse sources without FP8 weights, and weights or scales that lack each other.

        Raises:
            ConfigError: nothing in the folder is FP8.
            DataError: naming what does not fit.
        """
        quantized = [name for name, stored in source.tensors.items() if _is_quantized(source, stored)]
        if not quantized:
            raise ConfigError(f"{source.folder} has no FP8 tensor; give the quantized model")
        bare = [name for name in quantized if _scale_of(source, name) is None]
        if bare:
            raise DataError(f"{len(bare)} FP8 tensors of {source.folder} have no scale: {shown(bare)}")
        scales = [name for name, stored in source.tensors.items() if name.endswith("_scale_inv") or _is_e8m0(stored)]
        lone = [name for name in scales if not _is_scale(source, name)]
        if lone:
            raise DataError(f"{len(lone)} scales of {source.folder} have no FP8 weight: {shown(lone)}")
        for name in quantized:
            _scale_block(source, source.tensors[name])

    def plan_tensor(self, source: HfSource, stored: StoredTensor) -> TensorPlan:
        """Plan to multiply quantized tensors out, to drop scales, and to copy everything else."""
        name = stored.name
        if _is_scale(source, name) or name.endswith(ACTIVATION_SCALES):
            return dropped(stored)
        if not _is_quantized(source, stored):
            return copied(stored)
        scale = _scale_of(source, name)
        assert scale is not None, name
        block = _scale_block(source, stored)
        shape = _shape(stored)

        def convert(read: RowReader) -> Iterator[OutputRows]:
            scales = read.read(scale).float()
            if shape[:-2]:
                for first, matrices in read.chunks(stored):
                    yield name, first, _multiply_all(matrices, scales[first : first + matrices.size(0)], block)
                return
            height, width = shape
            scales = scales.reshape(num_blocks(height, width, block))
            for first, rows in read.chunks(stored, block[0] if scales.size(0) > 1 else 1):
                scale_rows, _ = num_blocks(rows.size(0), width, block)
                factors = scales[first // block[0] :][:scale_rows]
                is_fp4 = stored.dtype in FP4_CODES
                yield name, first, multiply_out(rows, factors) if is_fp4 else dequantize_block(rows, factors, block)

        return TensorPlan(stored, (TensorInfo.of(name, torch.bfloat16, shape),), convert)

    def config(self, source: HfSource) -> dict[str, Any]:
        """Return the source's config without quantization."""
        return {key: value for key, value in super().config(source).items() if key != EXPERT_DTYPE}


def _is_quantized(source: HfSource, stored: StoredTensor) -> bool:
    if stored.dtype in FP4_CODES:
        scale = _scale_of(source, stored.name)
        return scale is not None and _is_e8m0(scale)
    return stored.dtype in FP8_CODES


def _is_e8m0(stored: StoredTensor) -> bool:
    return stored.dtype == E8M0


def _shape(stored: StoredTensor) -> tuple[int, ...]:
    """Return the shape of the weight that the tensor represents."""
    packed = NUMBERS_PER_BYTE if stored.dtype in FP4_CODES else 1
    return (*stored.shape[:-1], stored.shape[-1] * packed)


def _scale_of(source: HfSource, name: str) -> StoredTensor | None:
    scale = scale_of(name, source.tensors)
    return None if scale is None else source.tensors[scale]


def _is_scale(source: HfSource, name: str) -> bool:
    """Return True for the scale of a quantized tensor."""
    weights = (name.removesuffix(got) + lost for lost, got in SCALE_NAMES if name.endswith(got))
    return any(weight in source.tensors and _is_quantized(source, source.tensors[weight]) for weight in weights)


def _scale_block(source: HfSource, stored: StoredTensor) -> tuple[int, int]:
    """Return the rows and columns that share a scale.

    Raises:
        DataError: the shape of the scales fits neither the config's block, nor rows, nor the whole tensor.
    """
    scale = _scale_of(source, stored.name)
    assert scale is not None, stored.name
    found = scale.shape
    if stored.dtype in FP4_CODES:
        if found != (stored.shape[0], stored.shape[-1] * NUMBERS_PER_BYTE / GROUP):
            raise DataError(
                f"{scale.name} has shape {list(found)}, {stored.name} has {list(stored.shape)} bytes of FP4: not one "
                f"scale per {GROUP} numbers of a row"
            )
        return 1, GROUP
    config = source.quantization_config or {}
    block = tuple(config.get("weight_block_size") or DEFAULT_BLOCK)
    if scale.dtype not in SCALE_CODES:
        raise DataError(f"{scale.name} has dtype {scale.dtype}; scales are {', '.join(SCALE_CODES)}")
    if len(stored.shape) < 2:
        raise DataError(f"{stored.name} has shape {list(stored.shape)}; only matrices are FP8 weights")
    rows, columns = stored.shape[-2:]
    leading = stored.shape[:-2]
    if found == (*leading, *num_blocks(rows, columns, block)):
        return block
    if found in ((*leading, rows, 1), (*leading, rows)):
        return 1, columns
    if not leading and found in ((), (1,), (1, 1)):
        return rows, columns
    raise DataError(
        f"{scale.name} has shape {list(found)}, {stored.name} has {list(stored.shape)}: neither one scale per "
        f"{block[0]} x {block[1]} block (weight_block_size of config.json), nor per row, nor per tensor"
    )


def _multiply_all(matrices: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply ``[..., M, N]`` of FP8 by their scales, matrix by matrix."""
    rows, columns = matrices.shape[-2:]
    flat = matrices.reshape(-1, rows, columns)
    factors = scales.reshape(flat.size(0), *num_blocks(rows, columns, block))
    return torch.stack([dequantize_block(*pair, block) for pair in zip(flat, factors)]).view(matrices.shape)


PACKED = "weight_packed"
SCALE = "weight_scale"
ZEROS = "weight_zero_point"
SHAPE = "weight_shape"
NUMBERS_PER_WORD = 8


@dataclass(frozen=True)
class Int4ToBf16(_ToBf16):
    """The conversion; a :class:`slime.ext.low_precision.folders.plan.Rewrite`."""

    quantization_config: dict[str, Any] | None = None
    """Of the folder's own config.json where None."""

    kind = "int4"

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that distinguish two conversions."""
        return {**super().settings, "quantization_config": self.quantization_config}

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

    def plan_tensor(self, source: HfSource, stored: StoredTensor) -> TensorPlan:
        """Plan to unpack and multiply out packed tensors, to drop their other parts, and to copy the rest."""
        prefix, _, part = stored.name.rpartition(".")
        prefix += "."
        if part in (SCALE, ZEROS, SHAPE) and prefix + PACKED in source.tensors:
            return dropped(stored)
        if part != PACKED:
            return copied(stored)
        layout = self._layout(source)
        bits = layout.num_bits
        scale = source.tensors[prefix + SCALE]
        zeros = None if layout.is_symmetric else source.tensors[prefix + ZEROS]
        rows, words_per_row = stored.shape
        if layout.group_size is None:  # the last word of a row may hold fewer numbers than there is room for
            columns = _last_size(source.tensors[prefix + SHAPE])
        else:
            columns = layout.group_size * scale.shape[1]
        if scale.shape[0] != rows or words_per_row != num_words(columns, bits):
            raise DataError(
                f"{scale.name} has shape {list(scale.shape)}, {stored.name} has "
                f"{list(stored.shape)}: they do not fit {bits} bits in groups of {layout.group_size}"
            )
        name = prefix + "weight"

        def convert(read: RowReader) -> Iterator[OutputRows]:
            scales = read.read(scale)
            points = None if zeros is None else read.read(zeros)
            for first, words in read.chunks(stored, NUMBERS_PER_WORD):
                count = words.size(0)
                parts = {PACKED: words, SCALE: scales[first : first + count], SHAPE: torch.tensor([count, columns])}
                if points is not None:
                    first_word = first * bits // WORD_BITS
                    parts[ZEROS] = points[first_word : first_word + num_words(count, bits)]
                yield name, first, layout.dequantize(name, parts)

        return TensorPlan(stored, (TensorInfo.of(name, torch.bfloat16, (rows, columns)),), convert)

    def _layout(self, source: HfSource) -> GroupInt:
        """Return the format in which the weights are packed.

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


def _last_size(shape: StoredTensor) -> int:
    """Return the last number in a stored ``weight_shape``."""
    return int(torch.from_numpy(read_bytes(shape)).view(TORCH_DTYPES[shape.dtype])[-1])


class Mxfp4ToBf16(_ToBf16):
    """The conversion of gpt-oss; a :class:`slime.ext.low_precision.folders.plan.Rewrite`."""

    kind = "mxfp4"

    def check(self, source: HfSource) -> None:
        """Refuse sources without MXFP4 weights, and blocks or scales that lack each other.

        Raises:
            ConfigError: nothing in the folder is MXFP4.
            DataError: naming what does not fit.
        """
        blocks = {name.removesuffix(BLOCKS) for name in source.tensors if name.endswith(BLOCKS)}
        scales = {name.removesuffix(SCALES) for name in source.tensors if name.endswith(SCALES)}
        if not blocks:
            raise ConfigError(f"{source.folder} has no tensor called *{BLOCKS}; give the published model in MXFP4")
        if lone := sorted(blocks ^ scales):
            raise DataError(f"{len(lone)} weights of {source.folder} lack {BLOCKS} or {SCALES}: {shown(lone)}")

    def plan_tensor(self, source: HfSource, stored: StoredTensor) -> TensorPlan:
        """Plan to multiply blocks out, expert by expert, to drop scales, and to copy everything else."""
        if stored.name.endswith(SCALES):
            return dropped(stored)
        if not stored.name.endswith(BLOCKS):
            return copied(stored)
        name = stored.name.removesuffix(BLOCKS)
        scales = source.tensors[f"{name}{SCALES}"]
        if len(stored.shape) != 4 or scales.shape != stored.shape[:-1]:
            raise DataError(
                f"{stored.name} has shape {list(stored.shape)} and {scales.name} {list(scales.shape)}; they must be "
                "[experts, rows, G, 16] and [experts, rows, G]"
            )
        experts, rows, groups, width = stored.shape

        def convert(read: RowReader) -> Iterator[OutputRows]:
            for expert in range(experts):
                yield name, expert, dequantize(name, read.read(stored, expert, 1), read.read(scales, expert, 1))

        shape = (experts, groups * width * NUMBERS_PER_BYTE, rows)
        return TensorPlan(stored, (TensorInfo.of(name, torch.bfloat16, shape),), convert)

    def config(self, source: HfSource) -> dict[str, Any]:
        """Return the source's config without quantization; engines read the dtype there."""
        return {"dtype": "bfloat16", **super().config(source)}
