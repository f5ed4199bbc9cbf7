"""``quantization_config`` of a config.json: which format it asks for, and which modules it leaves alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from slime.utils.errors import ConfigError
from slime.weights.quantize.block_fp8 import DEFAULT_BLOCK
from slime.weights.quantize.formats import BlockFp8, ChannelFp8, GroupInt, TensorFp8, WeightFormat

SUPPORTED = (
    "fp8 (e4m3, by block or by tensor, dynamic activations) and compressed-tensors (pack-quantized int4 and int8, "
    "float-quantized fp8 by channel, tensor or block, dynamic activations)"
)
FP8_LISTS = ("modules_to_not_convert", "ignored_layers")
"""What an fp8 config calls its list of unquantized modules."""

Config = Mapping[str, Any]


def read_format(
    quantization_config: Config | None, *, scale_dtype: torch.dtype = torch.bfloat16, ue8m0: bool = False
) -> WeightFormat | None:
    """The format of a quantized checkpoint; None for an unquantized one.

    Args:
        quantization_config: of the HF config.
        scale_dtype: of the scales of integers: the one in which engines hold unquantized weights.
        ue8m0: scales of fp8 blocks are powers of two, even where the config does not ask for them.

    Raises:
        ConfigError: the format, or a variant of it, cannot be made; the message names it and those that can.
    """
    if not quantization_config:
        return None
    method = quantization_config.get("quant_method")
    if method == "fp8":
        return _fp8(quantization_config, ue8m0)
    if method == "compressed-tensors":
        return _compressed_tensors(quantization_config, scale_dtype, ue8m0)
    raise _unsupported(str(method))


def ignored_modules(quantization_config: Config) -> list[str]:
    """The entries that name modules which engines build unquantized."""
    keys = FP8_LISTS if quantization_config.get("quant_method") == "fp8" else ("ignore",)
    return [str(entry) for key in keys for entry in quantization_config.get(key) or ()]


class IgnoredModules:
    """Tells which modules a config leaves unquantized, in the way engines read its list.

    An fp8 list holds parts of paths (``mlp.gate``, ``model.layers.0``); one of compressed-tensors names in full, or
    regular expressions behind ``re:``.
    """

    def __init__(self, quantization_config: Config) -> None:
        entries = ignored_modules(quantization_config)
        self._are_paths = quantization_config.get("quant_method") == "fp8"
        self._patterns = [re.compile(entry.removeprefix("re:")) for entry in entries if entry.startswith("re:")]
        self._names = {entry.removeprefix("model.").strip(".") if self._are_paths else entry for entry in entries}
        self._lengths = sorted({name.count(".") + 1 for name in self._names})

    def find(self, module: str) -> str | None:
        """The entry that covers the module ``model.layers.0.mlp.gate``, if one does."""
        if not self._are_paths:
            if module in self._names:
                return module
            return next((f"re:{p.pattern}" for p in self._patterns if p.match(module)), None)
        steps = module.split(".")
        for length in self._lengths:
            for first in range(len(steps) - length + 1):
                part = ".".join(steps[first : first + length])
                if part in self._names:
                    return part
        return None


def _fp8(config: Config, ue8m0: bool) -> WeightFormat:
    number_format = config.get("fmt") or "e4m3"
    # Written like DeepSeek's (e4m3) or like torch's dtype (MiniMax-M2: float8_e4m3fn).
    if not str(number_format).removesuffix("fn").endswith("e4m3"):
        raise _unsupported(f"fp8 with fmt {number_format}")
    scheme = config.get("activation_scheme", "dynamic")
    if scheme != "dynamic":
        raise _unsupported(f"fp8 with activation_scheme {scheme}")
    block = config.get("weight_block_size")
    if block is None:
        return TensorFp8()
    scale_format = config.get("scale_fmt")
    if scale_format not in (None, "float", "float32", "ue8m0"):
        raise _unsupported(f"fp8 with scale_fmt {scale_format}")
    return BlockFp8(_block_size(block, "weight_block_size"), ue8m0=ue8m0 or scale_format == "ue8m0")


def _compressed_tensors(config: Config, scale_dtype: torch.dtype, ue8m0: bool) -> WeightFormat:
    kind = config.get("format")
    if config.get("linear_fp8_config"):
        raise _unsupported("compressed-tensors with linear_fp8_config")
    groups = list((config.get("config_groups") or {}).values())
    schemes = [group.get("weights") or {} for group in groups]
    if not schemes or any(scheme != schemes[0] for scheme in schemes):
        raise _unsupported(f"compressed-tensors with {len(schemes)} different kinds of config_groups")
    for group in groups:
        activations = group.get("input_activations")
        if activations and (kind != "float-quantized" or not activations.get("dynamic")):
            raise _unsupported(f"compressed-tensors {kind} with quantized activations that are not dynamic")
        if group.get("output_activations"):
            raise _unsupported("compressed-tensors with output_activations")
        if group.get("format") not in (None, kind):
            raise _unsupported(f"compressed-tensors {kind} with a group in the format {group.get('format')}")
    weights = schemes[0]
    strategy, num_bits = weights.get("strategy"), weights.get("num_bits")
    described = f"compressed-tensors {kind} with {num_bits}-bit {weights.get('type')} weights by {strategy}"
    if weights.get("dynamic") or weights.get("actorder"):
        raise _unsupported(f"{described}, dynamic or with actorder")
    if kind == "pack-quantized" and weights.get("type") == "int" and num_bits in (4, 8):
        if strategy not in ("group", "channel"):
            raise _unsupported(described)
        size = weights.get("group_size")
        size = None if strategy == "channel" or size in (None, -1) else int(size)
        return GroupInt(int(num_bits), size, bool(weights.get("symmetric", True)), scale_dtype)
    if kind == "float-quantized" and weights.get("type") == "float" and num_bits == 8:
        if strategy == "channel":
            return ChannelFp8()
        if strategy == "tensor":
            return TensorFp8()
        if strategy == "block":
            block = _block_size(weights.get("block_structure") or DEFAULT_BLOCK, "block_structure")
            return BlockFp8(block, ue8m0=ue8m0, marker="weight_scale")
    raise _unsupported(described)


def _block_size(value: Iterable[Any], key: str) -> tuple[int, int]:
    sizes = list(value)
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(
            f"{key} in the quantization_config of --hf-checkpoint is {sizes}; it must be two positive numbers, rows "
            "and columns of a block, such as [128, 128]"
        )
    return sizes[0], sizes[1]


def _unsupported(what: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint is quantized ({what}); weights can be made for, and loaded from, {SUPPORTED}; point "
        "--hf-checkpoint (or --load, --ref-load where it is loaded) at one of these formats, or at an unquantized one."
    )
