"""Formats of quantized weights in checkpoints: which tensors represent one weight, how to compute them, and which
weights of an unquantized checkpoint a converter quantizes.

Every format turns ``X.weight`` into tensors named ``X.PART``, one for each part of the format; :func:`read_weight`
reads them back from a checkpoint's files.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.utils.errors import ConfigError, DataError
from slime.weights.quantize.block_fp8 import (
    DEFAULT_BLOCK,
    FP8,
    dequantize_block,
    num_blocks,
    quantize_block,
    quantize_channel,
    quantize_tensor,
    require_finite,
)
from slime.weights.quantize.group_int import (
    dequantize_group,
    num_groups,
    num_words,
    pack,
    quantize_group,
    unpack,
    zero_point_order,
)
from slime.weights.quantize.mxfp4 import (
    BLOCKS,
    FP4_CODES,
    GROUP,
    NUMBERS_PER_BYTE,
    SCALES,
    dequantize,
    multiply_out,
    quantize_rows,
)

Shape = tuple[int, ...]
SUFFIX = ".weight"
"""Suffix of weights that can be quantized; in a quantized checkpoint, part names follow the dot instead."""
PACKED = ".weight_packed"
EXPONENT = "scale"
"""Part name of one-byte power-of-two scales (DeepSeek-V4)."""
BLOCK_SCALE = "weight_scale_inv"
"""Part name of block FP8's fp32 scales."""
E8M0 = "F8_E8M0"
"""safetensors' dtype code for a one-byte exponent."""
FP8_CODES = ("F8_E4M3", "F8_E5M2")
SCALE_NAMES = (("", "_scale_inv"), ("", "_scale"), (SUFFIX, f".{EXPONENT}"))
"""(suffix to remove, suffix to append) that turns a weight's name into its scale's name."""
BESIDE_A_WEIGHT = ("_scale_inv", ".weight_scale", ".weight_shape", ".weight_zero_point")
"""Suffixes of tensors that are parts of a quantized weight."""
PartHeaders = dict[str, tuple[Shape, torch.dtype]]
"""Part of a weight's name -> shape and dtype."""


class WeightFormat(ABC):
    """The storage format of a quantized weight."""

    marker: str
    """The part whose presence marks a weight as quantized."""

    @abstractmethod
    def outputs(self, name: str, shape: Shape) -> PartHeaders:
        """Return the names, shapes and dtypes of :meth:`quantize`'s result without computing it.

        Raises:
            ConfigError: the format cannot hold this shape.
        """

    @abstractmethod
    def quantize(self, name: str, weight: Tensor, *, check_finite: bool) -> dict[str, Tensor]:
        """Return the tensors that represent the weight.

        Args:
            weight: ``[M, N]`` of bf16, fp16 or fp32.
            check_finite: raise an error for NaN or infinity; synchronizes with the device.

        Raises:
            DataError: ``check_finite`` is set and the weight is not finite.
        """

    @abstractmethod
    def dequantize(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the bf16 weight that the parts represent.

        Raises:
            DataError: the parts' shapes do not match.
        """


@dataclass(frozen=True, slots=True)
class BlockFp8(WeightFormat):
    """e4m3 with one scale per block: fp32, or a one-byte power of two (``scale_dtype``)."""

    block: tuple[int, int]
    ue8m0: bool = False
    """True if scales are powers of two."""
    marker: str = BLOCK_SCALE
    scale_dtype: torch.dtype = torch.float32

    def outputs(self, name: str, shape: Shape) -> PartHeaders:
        rows, columns = _matrix(name, shape)
        return {"weight": (shape, FP8), self.marker: (num_blocks(rows, columns, self.block), self.scale_dtype)}

    def quantize(self, name: str, weight: Tensor, *, check_finite: bool) -> dict[str, Tensor]:
        quantized, scale = quantize_block(weight, self.block, ue8m0=self.ue8m0, name=name if check_finite else None)
        return {"weight": quantized, self.marker: scale.to(self.scale_dtype)}

    def dequantize(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        return dequantize_block(parts["weight"], parts[self.marker], self.block)


@dataclass(frozen=True, slots=True)
class TensorFp8(WeightFormat):
    """e4m3 with one fp32 scale per matrix."""

    marker: str = "weight_scale"

    def outputs(self, name: str, shape: Shape) -> PartHeaders:
        _matrix(name, shape)
        return {"weight": (shape, FP8), self.marker: ((1,), torch.float32)}

    def quantize(self, name: str, weight: Tensor, *, check_finite: bool) -> dict[str, Tensor]:
        quantized, scale = quantize_tensor(weight, name=name if check_finite else None)
        return {"weight": quantized, self.marker: scale}

    def dequantize(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        scale = parts[self.marker]
        if scale.numel() != 1:
            raise DataError(f"{name} has {scale.numel()} scales; config.json says one per tensor")
        return (parts["weight"].float() * scale.float().view(1, 1)).to(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class ChannelFp8(WeightFormat):
    """e4m3 with one fp32 scale per row."""

    marker: str = "weight_scale"

    def outputs(self, name: str, shape: Shape) -> PartHeaders:
        rows, _ = _matrix(name, shape)
        return {"weight": (shape, FP8), self.marker: ((rows, 1), torch.float32)}

    def quantize(self, name: str, weight: Tensor, *, check_finite: bool) -> dict[str, Tensor]:
        quantized, scale = quantize_channel(weight, name=name if check_finite else None)
        return {"weight": quantized, self.marker: scale}

    def dequantize(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        weight, scale = parts["weight"], parts[self.marker]
        return dequantize_block(weight, scale.view(-1, 1), (1, weight.size(1)))


@dataclass(frozen=True, slots=True)
class GroupInt(WeightFormat):
    """Packed integers with a scale, and a zero point if asymmetric, per group of columns."""

    num_bits: int
    group_size: int | None
    """None for one group per row."""
    is_symmetric: bool
    scale_dtype: torch.dtype = torch.bfloat16
    marker: str = "weight_packed"

    def outputs(self, name: str, shape: Shape) -> PartHeaders:
        rows, columns = _matrix(name, shape)
        groups = num_groups(columns, self.group_size, name)
        headers: PartHeaders = {
            "weight_packed": ((rows, num_words(columns, self.num_bits)), torch.int32),
            "weight_scale": ((rows, groups), self.scale_dtype),
            "weight_shape": ((2,), torch.int32),
        }
        if not self.is_symmetric:
            headers["weight_zero_point"] = ((num_words(rows, self.num_bits), groups), torch.int32)
        return headers

    def quantize(self, name: str, weight: Tensor, *, check_finite: bool) -> dict[str, Tensor]:
        quantized, scale, zeros = quantize_group(
            weight,
            num_bits=self.num_bits,
            groups=num_groups(weight.size(1), self.group_size, name),
            is_symmetric=self.is_symmetric,
            scale_dtype=self.scale_dtype,
            name=name if check_finite else None,
        )
        parts = {
            "weight_packed": pack(quantized, self.num_bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape, dtype=torch.int32, device=weight.device),
        }
        if zeros is not None:
            order = zero_point_order(name, self.num_bits)
            parts["weight_zero_point"] = pack(zeros.T, self.num_bits, order).T.contiguous()
        return parts

    def dequantize(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        rows, columns = (int(size) for size in parts["weight_shape"])
        packed = parts["weight_packed"]
        if tuple(packed.shape) != (rows, num_words(columns, self.num_bits)):
            raise DataError(f"{tuple(packed.shape)} packed words for a {rows} x {columns} weight")
        zeros = None
        if not self.is_symmetric:
            order = zero_point_order(name, self.num_bits)
            zeros = unpack(parts["weight_zero_point"].T, self.num_bits, rows, order).T
        quantized = unpack(packed, self.num_bits, columns)
        return dequantize_group(quantized, parts["weight_scale"], zeros, num_bits=self.num_bits)


@dataclass(frozen=True, slots=True)
class PackedFp4(WeightFormat):
    """e2m1, two numbers per byte, with one power-of-two scale per 32 numbers of a row."""

    marker: str = EXPONENT

    def outputs(self, name: str, shape: Shape) -> PartHeaders:
        rows, columns = _matrix(name, shape)
        if columns % GROUP:
            raise ConfigError(f"{name} has {columns} columns; FP4 needs a multiple of {GROUP}")
        return {
            "weight": ((rows, columns // NUMBERS_PER_BYTE), torch.int8),
            self.marker: ((rows, columns // GROUP), torch.float8_e8m0fnu),
        }

    def quantize(self, name: str, weight: Tensor, *, check_finite: bool) -> dict[str, Tensor]:
        self.outputs(name, tuple(weight.shape))  # raises if rows do not split into whole groups
        packed, scale = quantize_rows(weight)
        if check_finite:
            require_finite(name, scale.float())
        return {"weight": packed, self.marker: scale}

    def dequantize(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        packed, scale = parts["weight"], parts[self.marker]
        if packed.is_floating_point() or packed.element_size() != 1 or scale.dtype != torch.float8_e8m0fnu:
            raise DataError(
                f"{name} is stored in {packed.dtype} with scales in {scale.dtype}; one-byte integers are read as "
                "two FP4 numbers each, whose scales must be torch.float8_e8m0fnu"
            )
        if packed.dim() != 2 or tuple(scale.shape) != (packed.size(0), packed.size(1) * NUMBERS_PER_BYTE / GROUP):
            raise DataError(
                f"{name} has {list(packed.shape)} bytes of two numbers and scales of shape {list(scale.shape)}; there "
                f"must be one scale per {GROUP} numbers of a row"
            )
        return multiply_out(packed, scale)


@dataclass(frozen=True, slots=True)
class TwoFormats(WeightFormat):
    """One format for most weights and another for some, such as 8-bit layers with 4-bit experts."""

    usual: WeightFormat
    other: WeightFormat
    names: frozenset[str]
    """``X.weight`` for every weight in the ``other`` format."""

    @property
    def marker(self) -> str:  # type: ignore[override]
        """The marker that both formats share."""
        return self.usual.marker

    def outputs(self, name: str, shape: Shape) -> PartHeaders:
        return self._of(name).outputs(name, shape)

    def quantize(self, name: str, weight: Tensor, *, check_finite: bool) -> dict[str, Tensor]:
        return self._of(name).quantize(name, weight, check_finite=check_finite)

    def dequantize(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        return self._of(name).dequantize(name, parts)

    def _of(self, name: str) -> WeightFormat:
        return self.other if name in self.names else self.usual


def _matrix(name: str, shape: Shape) -> tuple[int, int]:
    if len(shape) != 2:
        raise DataError(f"{name} of shape {list(shape)} is quantized in the checkpoint; only matrices can be")
    return shape[0], shape[1]


# --- quantized weights in the files of a checkpoint -----------------------------------------------------------------


def logical_names(stored: Mapping[str, str]) -> list[str]:
    """Return the names that the tensors would have if nothing were quantized, in the given order.

    Args:
        stored: name of every tensor in the files -> its safetensors dtype code.
    """
    names = []
    packed_in_fp4 = {name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)}
    for name in stored:
        if name.endswith(PACKED):
            names.append(name.removesuffix(PACKED) + SUFFIX)
        elif name.endswith(BLOCKS):
            names.append(name.removesuffix(BLOCKS))
        elif name.endswith(SCALES) and name.removesuffix(SCALES) in packed_in_fp4:
            continue
        elif is_scale(name, stored):
            continue
        elif not name.endswith(BESIDE_A_WEIGHT):
            names.append(name)
    return names


def is_scale(name: str, stored: Mapping[str, str]) -> bool:
    """Return True if ``name`` is an ``X.scale`` of a quantized ``X.weight``, not a parameter called ``scale``.

    Args:
        stored: see :func:`logical_names`.
    """
    if not name.endswith(f".{EXPONENT}"):
        return False
    weight = stored.get(name.removesuffix(f".{EXPONENT}") + SUFFIX)
    return weight in FP8_CODES or (weight in FP4_CODES and stored[name] == E8M0)


def read_weight(
    name: str, get: Callable[[str], Tensor], stored_names: Collection[str], weight_format: WeightFormat | None
) -> Tensor:
    """Read the model's tensor ``name``: as stored, or dequantized to bf16.

    Args:
        name: one of :func:`logical_names`.
        get: reads a stored tensor by name.
        stored_names: names of all stored tensors.
        weight_format: the format from the checkpoint's config; None guesses from names and shapes.

    Raises:
        DataError: parts of a quantized weight are missing or do not match.
    """
    if f"{name}{BLOCKS}" in stored_names:
        if f"{name}{SCALES}" not in stored_names:
            raise DataError(f"{name}{BLOCKS} is MXFP4, but {name}{SCALES} is missing; copy the checkpoint again")
        return dequantize(name, get(f"{name}{BLOCKS}"), get(f"{name}{SCALES}"))
    if name not in stored_names:
        return _read_packed(name, get, stored_names, weight_format)
    tensor = get(name)
    if tensor.element_size() != 1:
        return tensor
    scale_name = scale_of(name, stored_names)
    if scale_name is None:
        if not tensor.is_floating_point():
            return tensor
        raise DataError(f"{name} is stored in {tensor.dtype} without a scale (called {name}_scale_inv)")
    scale = get(scale_name)
    if not tensor.is_floating_point():
        return PackedFp4().dequantize(name, {"weight": tensor, EXPONENT: scale})
    fp8_format = _fp8_format(scale_name, tensor, scale, weight_format)
    return fp8_format.dequantize(name, {"weight": tensor, fp8_format.marker: scale})


def scale_of(name: str, stored_names: Collection[str]) -> str | None:
    """Return the name of an 8- or 4-bit weight's scale; None if none is stored."""
    names = (name.removesuffix(lost) + got for lost, got in SCALE_NAMES if name.endswith(lost))
    return next((scale for scale in names if scale in stored_names), None)


def _read_packed(
    name: str, get: Callable[[str], Tensor], stored_names: Collection[str], weight_format: WeightFormat | None
) -> Tensor:
    base = name.removesuffix(SUFFIX)
    if not isinstance(weight_format, GroupInt):
        raise DataError(
            f"{base}{PACKED} is packed, and the config.json beside it does not say how (quantization_config with the "
            "format pack-quantized)"
        )
    parts = ["weight_packed", "weight_scale", "weight_shape"]
    if not weight_format.is_symmetric:
        parts.append("weight_zero_point")
    for part in parts:
        if f"{base}.{part}" not in stored_names:
            raise DataError(f"{name} is packed, but {base}.{part} is missing; copy or convert the checkpoint again")
    return weight_format.dequantize(name, {part: get(f"{base}.{part}") for part in parts})


def _fp8_format(scale_name: str, weight: Tensor, scale: Tensor, weight_format: WeightFormat | None) -> WeightFormat:
    if weight_format is not None and not isinstance(weight_format, GroupInt):
        return weight_format
    if scale_name.endswith(("_scale_inv", f".{EXPONENT}")):
        return BlockFp8(DEFAULT_BLOCK)
    if scale.numel() == 1:
        return TensorFp8()
    if scale.numel() == weight.size(0):
        return ChannelFp8()
    raise DataError(f"{scale_name} has the shape {tuple(scale.shape)}, and no config.json says how to apply it")


# Converters leave these unquantized: weights that are not used in a matrix product (norms, embeddings), weights that
# make discrete decisions (routers), the vocabulary projection, and matrices that SGLang holds in plain linear layers,
# which have no scale.  Pushes follow the converted checkpoint's index, so this table decides for them too.
EXCLUDED: Mapping[str, str] = {
    # part of the name, in any family -> reason
    "norm": "a vector",
    "embed": "looked up, not multiplied",
    "lm_head": "sampling uses its logits",
    "router": "chooses experts",
    ".gate.": "chooses experts",
    "conv1d": "a convolution",
}


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """Weights that converters leave unquantized in one family, besides :data:`EXCLUDED`."""

    parts: tuple[str, ...] = ()
    """Parts of the names of matrices that engines hold in plain linear layers or do not multiply."""
    apart: tuple[str, ...] = ()
    """Regular expressions for tensors outside the language model, such as a vision tower's."""

    def is_apart(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.apart)


def is_quantized_offline(name: str, shape: Sequence[int] | None = None, plain: PlainWeights | None = None) -> bool:
    """Return True if converters quantize the tensor.

    Args:
        name: HF name of a tensor in an unquantized checkpoint.
        shape: its shape, if known; only matrices are quantized.
        plain: the family's unquantized weights (``WeightMap.plain``).
    """
    if not name.endswith(SUFFIX) or (shape is not None and len(shape) != 2):
        return False
    parts = (*EXCLUDED, *(plain.parts if plain else ()))
    return not any(part in name for part in parts) and not (plain and plain.is_apart(name))


def modules_to_not_convert(names: Iterable[str], plain: PlainWeights | None = None) -> list[str]:
    """Return the modules that a quantized config must list so that engines build them unquantized.

    Args:
        plain: see :func:`is_quantized_offline`.

    Returns:
        Full module names, sorted, without norms, which no engine quantizes.  Modules outside the language model are
        also listed as a whole, by their name in engines.
    """
    kept = [name for name in names if name.endswith(SUFFIX) and not is_quantized_offline(name, plain=plain)]
    apart = {name.removeprefix("model.").partition(".")[0] for name in kept if plain and plain.is_apart(name)}
    return sorted({name.removesuffix(SUFFIX) for name in kept if "norm" not in name} | apart)
