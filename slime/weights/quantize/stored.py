"""Quantized weights in the files of a checkpoint: which tensors belong together, and their values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import Tensor

from slime.utils.errors import DataError
from slime.weights.quantize.block_fp8 import DEFAULT_BLOCK
from slime.weights.quantize.formats import BlockFp8, ChannelFp8, GroupInt, TensorFp8, WeightFormat
from slime.weights.quantize.offline_rules import SUFFIX

PACKED = ".weight_packed"
BESIDE_A_WEIGHT = ("_scale_inv", ".weight_scale", ".weight_shape", ".weight_zero_point")
"""What the tensors are called that are nothing without the weight beside them."""


def logical_names(stored_names: Iterable[str]) -> list[str]:
    """Names of all tensors as if nothing were quantized, in the given order."""
    names = []
    for name in stored_names:
        if name.endswith(PACKED):
            names.append(name.removesuffix(PACKED) + SUFFIX)
        elif not name.endswith(BESIDE_A_WEIGHT):
            names.append(name)
    return names


def read_weight(
    name: str, get: Callable[[str], Tensor], stored_names: Collection[str], weight_format: WeightFormat | None
) -> Tensor:
    """The tensor that the model calls ``name``: as it is stored, or in bf16 if it is quantized.

    Args:
        name: one of :func:`logical_names`.
        get: reads a stored tensor.
        stored_names: all that there are.
        weight_format: what the checkpoint's config says; None guesses from the names and shapes.

    Raises:
        DataError: the parts of a quantized weight are not there, or do not fit each other.
    """
    if name not in stored_names:
        return _read_packed(name, get, stored_names, weight_format)
    tensor = get(name)
    if tensor.element_size() != 1 or not tensor.is_floating_point():
        return tensor
    scale_name = next((f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in stored_names), None)
    if scale_name is None:
        raise DataError(f"{name} is stored in {tensor.dtype} without a scale (called {name}_scale_inv)")
    scale = get(scale_name)
    fp8_format = _fp8_format(scale_name, tensor, scale, weight_format)
    return fp8_format.dequantize(name, {"weight": tensor, fp8_format.marker: scale})


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
    if scale_name.endswith("_scale_inv"):
        return BlockFp8(DEFAULT_BLOCK)
    if scale.numel() == 1:
        return TensorFp8()
    if scale.numel() == weight.size(0):
        return ChannelFp8()
    raise DataError(f"{scale_name} has the shape {tuple(scale.shape)}, and no config.json says how to apply it")
