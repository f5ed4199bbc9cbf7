"""Formats of quantized weights in checkpoints: the tensors that represent one weight, how to make them, and which
weights of an unquantized checkpoint a conversion gives them.

Every format turns ``X.weight`` into tensors called ``X.`` and one of the format's parts; :func:`read_weight` reads
them back from the files of a checkpoint.
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
"""Suffix of weights that can be quantized; in a quantized checkpoint other names follow the dot."""
PACKED = ".weight_packed"
EXPONENT = "scale"
"""Part of a weight whose scales are powers of two of one byte each (DeepSeek-V4)."""
BLOCK_SCALE = "weight_scale_inv"
"""Part of a weight in FP8 by blocks whose scales are fp32."""
E8M0 = "F8_E8M0"
"""An exponent of one byte, as safetensors spells the dtype."""
FP8_CODES = ("F8_E4M3", "F8_E5M2")
SCALE_NAMES = (("", "_scale_inv"), ("", "_scale"), (SUFFIX, f".{EXPONENT}"))
"""What the name of a weight loses and gets to be the name of its scale."""
BESIDE_A_WEIGHT = ("_scale_inv", ".weight_scale", ".weight_shape", ".weight_zero_point")
"""Suffixes of tensors that belong to a weight."""
PartHeaders = dict[str, tuple[Shape, torch.dtype]]
"""Part of a weight's name -> shape and dtype."""


class WeightFormat(ABC):
    """The storage format of one weight."""

    marker: str
    """The part that only a quantized weight has."""

    @abstractmethod
    def outputs(self, name: str, shape: Shape) -> PartHeaders:
        """Return names, dtypes and shapes of the result of :meth:`quantize` without computing it.

        Raises:
            ConfigError: the format cannot hold this shape.
        """

    @abstractmethod
    def quantize(self, name: str, weight: Tensor, *, check_finite: bool) -> dict[str, Tensor]:
        """Return the tensors that represent the weight.

        Args:
            weight: ``[M, N]`` of bf16, fp16 or fp32.
            check_finite: a NaN or an infinity is an error; costs a wait for the device.

        Raises:
            DataError: ``check_finite`` is given and the weight is not finite.
        """

    @abstractmethod
    def dequantize(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the bf16 weight that the parts represent.

        Raises:
            DataError: their shapes do not fit each other.
        """


@dataclass(frozen=True, slots=True)
class BlockFp8(WeightFormat):
    """e4m3 with one scale per block: fp32, or a power of two of one byte (``scale_dtype``)."""

    block: tuple[int, int]
    ue8m0: bool = False
    """Scales are powers of two."""
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
            raise DataError(f"{name} has {scale.numel()} scales and must have one: they are by tensor in config.json")
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
    """Packed integers with scales, and perhaps zero points, per group of columns."""

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
    """e2m1, two numbers a byte, with one power of two per 32 numbers of a row."""

    marker: str = EXPONENT

    def outputs(self, name: str, shape: Shape) -> PartHeaders:
        rows, columns = _matrix(name, shape)
        if columns % GROUP:
            raise ConfigError(f"{name} has rows of {columns}; in four bits they are multiples of {GROUP}")
        return {
            "weight": ((rows, columns // NUMBERS_PER_BYTE), torch.int8),
            self.marker: ((rows, columns // GROUP), torch.float8_e8m0fnu),
        }

    def quantize(self, name: str, weight: Tensor, *, check_finite: bool) -> dict[str, Tensor]:
        self.outputs(name, tuple(weight.shape))  # refuses what has no whole groups
        packed, scale = quantize_rows(weight)
        if check_finite:
            require_finite(name, scale.float())
        return {"weight": packed, self.marker: scale}

    def dequantize(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        packed, scale = parts["weight"], parts[self.marker]
        if packed.is_floating_point() or packed.element_size() != 1 or scale.dtype != torch.float8_e8m0fnu:
            raise DataError(
                f"{name} is stored in {packed.dtype} with a scale in {scale.dtype}; integers of one byte are read as "
                "two numbers of FP4 each, whose scales are torch.float8_e8m0fnu"
            )
        if packed.dim() != 2 or tuple(scale.shape) != (packed.size(0), packed.size(1) * NUMBERS_PER_BYTE / GROUP):
            raise DataError(
                f"{name} has {list(packed.shape)} bytes of two numbers, and scales {list(scale.shape)}: not one per "
                f"{GROUP} numbers of a row"
            )
        return multiply_out(packed, scale)


@dataclass(frozen=True, slots=True)
class TwoFormats(WeightFormat):
    """One format for most weights, and one for some: experts in four bits beside layers in eight."""

    usual: WeightFormat
    other: WeightFormat
    names: frozenset[str]
    """``X.weight`` of all that have the other one."""

    @property
    def marker(self) -> str:  # type: ignore[override]
        """The part that both have."""
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
        raise DataError(f"{name} is quantized in the checkpoint and has the shape {list(shape)}; only matrices can be")
    return shape[0], shape[1]


# --- quantized weights in the files of a checkpoint -----------------------------------------------------------------


def logical_names(stored: Mapping[str, str]) -> list[str]:
    """Return the names of all tensors as if nothing were quantized, in the given order.

    Args:
        stored: name of every tensor in the files -> its dtype as safetensors spells it.
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
    """Return True for an ``X.scale`` that is part of a quantized ``X.weight``; others are tensors of a model.

    Args:
        stored: as :func:`logical_names` has it.
    """
    if not name.endswith(f".{EXPONENT}"):
        return False
    weight = stored.get(name.removesuffix(f".{EXPONENT}") + SUFFIX)
    return weight in FP8_CODES or (weight in FP4_CODES and stored[name] == E8M0)


def read_weight(
    name: str, get: Callable[[str], Tensor], stored_names: Collection[str], weight_format: WeightFormat | None
) -> Tensor:
    """Return the tensor that the model calls ``name``: as it is stored, or in bf16 if it is quantized.

    Args:
        name: one of :func:`logical_names`.
        weight_format: what the checkpoint's config says; None guesses from the names and shapes.

    Raises:
        DataError: the parts of a quantized weight are not there, or do not fit each other.
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
    """Return the name of the scale of a weight in eight or four bits; None if none is stored."""
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


# What a conversion leaves as it is: everything without a matrix product of its own (norms, embeddings), what decides
# discretely (routers), the vocabulary projection, and matrices that SGLang holds in plain linear layers, which cannot
# take a scale.  A push follows the converted checkpoint's index, so that this decides for it too.
EXCLUDED: Mapping[str, str] = {
    # part of the name, in any family -> why
    "norm": "a vector",
    "embed": "looked up, not multiplied",
    "lm_head": "its logits are what is sampled from",
    "router": "chooses experts",
    ".gate.": "chooses experts",
    "conv1d": "a convolution",
}


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """What a conversion leaves as it is in one family, beside :data:`EXCLUDED`."""

    parts: tuple[str, ...] = ()
    """Of names of matrices that engines hold in plain linear layers, or that are not multiplied."""
    apart: tuple[str, ...] = ()
    """Regular expressions of tensors beside the language model, such as a vision tower's."""

    def is_apart(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.apart)


def is_quantized_offline(name: str, shape: Sequence[int] | None = None, plain: PlainWeights | None = None) -> bool:
    """Return True when a converter quantizes the tensor.

    Args:
        name: HF name of a tensor of an unquantized checkpoint.
        plain: of its family (``WeightMap.plain``).
    """
    if not name.endswith(SUFFIX) or (shape is not None and len(shape) != 2):
        return False
    parts = (*EXCLUDED, *(plain.parts if plain else ()))
    return not any(part in name for part in parts) and not (plain and plain.is_apart(name))


def modules_to_not_convert(names: Iterable[str], plain: PlainWeights | None = None) -> list[str]:
    """Return the modules that a quantized config must name, so that engines build them unquantized.

    Args:
        plain: as :func:`is_quantized_offline` has it.

    Returns:
        Module names in full, sorted, without those of norms, which no engine would quantize; what is beside the
        language model also as a whole, by the name that it has in engines.
    """
    kept = [name for name in names if name.endswith(SUFFIX) and not is_quantized_offline(name, plain=plain)]
    apart = {name.removeprefix("model.").partition(".")[0] for name in kept if plain and plain.is_apart(name)}
    return sorted({name.removesuffix(SUFFIX) for name in kept if "norm" not in name} | apart)
