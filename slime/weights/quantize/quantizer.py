"""Quantizes named tensors for engines that hold some weights quantized, as the ``quantization_config`` says.

:func:`read_quantization` reads a checkpoint's config: the format, and which modules stay unquantized.  A
:class:`Quantizer` produces the tensors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slime.utils.errors import ConfigError
from slime.weights.named_tensors import Header, NamedTensors
from slime.weights.quantize.block_fp8 import DEFAULT_BLOCK
from slime.weights.quantize.formats import (
    BLOCK_SCALE,
    E8M0,
    EXPONENT,
    SUFFIX,
    BlockFp8,
    ChannelFp8,
    GroupInt,
    PackedFp4,
    PlainWeights,
    Shape,
    TensorFp8,
    TwoFormats,
    WeightFormat,
    is_quantized_offline,
    is_scale,
)
from slime.weights.quantize.mxfp4 import FP4_CODES
from slime.weights.quantize.mxfp4 import METHOD as MXFP4

logger = logging.getLogger(__name__)

SUPPORTED = (
    "fp8 (e4m3, by block or by tensor, dynamic activations; by block also with one-byte scales and experts in FP4) "
    "and compressed-tensors (pack-quantized int4 and int8, float-quantized fp8 by channel, tensor or block, dynamic "
    "activations)"
)
FP8_LISTS = ("modules_to_not_convert", "ignored_layers")
"""Keys of an fp8 config that list unquantized modules."""

Config = Mapping[str, Any]


class Quantizer:
    """Quantizes, in a checkpoint's format, the weights that the checkpoint holds quantized.

    Args:
        quantized_names: ``X.weight`` for every quantized weight.
        known_names: ``X.weight`` for every weight of the checkpoint, quantized or not.  Any other weight is an error,
            because it is unknown how engines hold it.  None trusts ``quantized_names`` alone.
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        quantized_names: Collection[str],
        *,
        known_names: Collection[str] | None = None,
    ) -> None:
        self.format = weight_format
        self.quantized_names = frozenset(quantized_names)
        self._known_names = None if known_names is None else frozenset(known_names)

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns of a block that shares a scale; None if slices cannot be quantized independently."""
        if isinstance(self.format, BlockFp8) and self.format.scale_dtype == torch.float32:
            return self.format.block
        return None

    def is_quantized(self, name: str) -> bool:
        """Return True if engines hold the HF tensor ``name`` quantized.

        Raises:
            ConfigError: the checkpoint does not have this weight.
        """
        if name in self.quantized_names:
            return True
        if self._known_names is not None and name.endswith(SUFFIX) and name not in self._known_names:
            raise ConfigError(
                f"the quantized --hf-checkpoint has no tensor {name}, so it is unknown whether engines hold it "
                "quantized; point --hf-checkpoint at a checkpoint with all layers that the flags ask for "
                "(--num-layers, --mtp-num-layers)"
            )
        return False

    def outputs(self, name: str, shape: Shape) -> list[Header]:
        """Return name, shape and dtype of the tensors that :meth:`quantize` returns for a quantized weight."""
        headers = self.format.outputs(name, tuple(shape))
        return [(_part_name(name, part), part_shape, dtype) for part, (part_shape, dtype) in headers.items()]

    def quantize(self, name: str, tensor: Tensor) -> NamedTensors:
        """Return a tensor as it is sent: unchanged, or in its quantized form.

        Args:
            tensor: the full tensor, in the dtype in which it would be sent unquantized.

        Raises:
            ConfigError: the format cannot hold the shape, or the checkpoint does not have the tensor.
        """
        if not self.is_quantized(name):
            return [(name, tensor)]
        parts = self.format.quantize(name, tensor, check_finite=False)
        return [(_part_name(name, part), value) for part, value in parts.items()]


def as_stored(weight_format: WeightFormat, stored: Mapping[str, str]) -> WeightFormat:
    """Refine the format from config.json by what the checkpoint's files show.

    DeepSeek-V4 has one-byte scales named ``X.scale`` and four-bit experts, which its config.json does not say.

    Args:
        stored: name of every tensor in the files -> its safetensors dtype code.

    Raises:
        ConfigError: the files mix one-byte scales with others.
    """
    if not isinstance(weight_format, BlockFp8):
        return weight_format
    scales = [name for name in stored if is_scale(name, stored)]
    exponents = [name for name in scales if stored[name] == E8M0]
    if not exponents:
        return weight_format
    others = [name for name in stored if name.endswith(f".{BLOCK_SCALE}")]
    if others := sorted({*others, *scales}.difference(exponents)):
        raise ConfigError(
            f"--hf-checkpoint has {len(exponents)} scales in {E8M0}, such as {exponents[0]}, and {len(others)} that "
            f"are {others[0]} in {stored[others[0]]} or the like; a checkpoint has one form of scales, {E8M0} called "
            f"*.{EXPONENT} or F32 called *.{BLOCK_SCALE}. Convert it again"
        )
    eight_bits = replace(weight_format, ue8m0=True, marker=EXPONENT, scale_dtype=torch.float8_e8m0fnu)
    weights = (name.removesuffix(f".{EXPONENT}") + SUFFIX for name in exponents)
    four_bits = frozenset(name for name in weights if stored[name] in FP4_CODES)
    return TwoFormats(eight_bits, PackedFp4(), four_bits) if four_bits else eight_bits


def quantized_names(stored: Mapping[str, str], weight_format: WeightFormat) -> frozenset[str]:
    """Return ``X.weight`` for every weight that a checkpoint holds quantized.

    Args:
        stored: see :func:`as_stored`.

    Raises:
        ConfigError: there are none.
    """
    marker = f".{weight_format.marker}"
    parts = [name for name in stored if name.endswith(marker)]
    if weight_format.marker == EXPONENT:
        parts = [name for name in parts if is_scale(name, stored)]
    found = frozenset(name.removesuffix(marker) + SUFFIX for name in parts)
    if not found:
        raise ConfigError(
            f"the config.json of --hf-checkpoint has a quantization_config, but none of its {len(stored)} "
            f"tensors is quantized (called *{marker}); convert the checkpoint again, or remove the quantization_config"
        )
    return found


@dataclass(frozen=True)
class QuantizationConfig:
    """A checkpoint's parsed ``quantization_config``.

    Attributes:
        format: format of the quantized weights.
        ignored: the modules that stay unquantized.
    """

    format: WeightFormat
    ignored: IgnoredModules

    def check_names(self, quantized_names: Collection[str]) -> None:
        """Check that no quantized weight is listed as unquantized: engines would drop its scales.

        Raises:
            ConfigError: names the weight and the list's entry.
        """
        for name in sorted(quantized_names):
            entry = self.ignored.find(name.removesuffix(SUFFIX))
            if entry is not None:
                raise ConfigError(
                    f"--hf-checkpoint has {name} quantized, but its quantization_config lists {entry!r} among the "
                    "modules that are not; correct the list in config.json, or convert the checkpoint again"
                )

    def warn_of_unlisted_weights(
        self, stored_names: Collection[str], quantized_names: Collection[str], plain: PlainWeights | None = None
    ) -> list[str]:
        """Warn about, and return, weights that should be quantized but are not, and are not listed as unquantized.

        Args:
            plain: the family's unquantized weights.
        """
        unlisted = sorted(
            name
            for name in stored_names
            if name not in quantized_names
            and is_quantized_offline(name, plain=plain)
            and self.ignored.find(name.removesuffix(SUFFIX)) is None
        )
        if unlisted:
            logger.warning(
                "--hf-checkpoint has %d unquantized matrices that its quantization_config does not list as such, for "
                "example %s; engines may read them as quantized.", len(unlisted), unlisted[0],
            )  # fmt: skip
        return unlisted


def _part_name(name: str, part: str) -> str:
    return f"{name.removesuffix(SUFFIX)}.{part}"


# --- quantization_config of a config.json ---------------------------------------------------------------------------


def read_quantization(
    quantization_config: Config | None, *, scale_dtype: torch.dtype = torch.bfloat16
) -> QuantizationConfig | None:
    """Parse the config of a quantized checkpoint; None for an unquantized one.

    See :func:`read_format` for arguments and errors.
    """
    weight_format = read_format(quantization_config, scale_dtype=scale_dtype)
    if weight_format is None or quantization_config is None:
        return None
    return QuantizationConfig(weight_format, IgnoredModules(quantization_config))


def read_format(
    quantization_config: Config | None, *, scale_dtype: torch.dtype = torch.bfloat16
) -> WeightFormat | None:
    """Return the format of a quantized checkpoint; None for an unquantized one.

    Args:
        scale_dtype: dtype of integer formats' scales: the one in which engines hold unquantized weights.

    Raises:
        ConfigError: the format or variant is not supported; the message names it and the supported ones.
    """
    if not quantization_config:
        return None
    _check_lists(quantization_config)
    method = quantization_config.get("quant_method")
    try:
        if method == "fp8":
            return _fp8(quantization_config)
        if method == "compressed-tensors":
            return _compressed_tensors(quantization_config, scale_dtype)
    except (AttributeError, TypeError, KeyError) as error:
        shown = str(dict(quantization_config))[:300]
        raise ConfigError(
            f"quantization_config of config.json has a value of another type ({error}): {shown}"
        ) from error
    if method == MXFP4:
        raise ConfigError(
            "--hf-checkpoint is MXFP4, which can be read (--load, --ref-load, tools/convert_hf_to_torch_dist.py), but "
            "not pushed to engines; make a bf16 folder for them (tools/convert_mxfp4_to_bf16.py) and give that"
        )
    raise _unsupported(str(method))


def _check_lists(quantization_config: Config) -> None:
    """Check that the ignore lists are lists of names with valid regular expressions."""
    for key in ("ignore", *FP8_LISTS):
        entries = quantization_config.get(key) or []
        try:
            if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
                raise ValueError("it must be a list of names")
            for entry in entries:
                if entry.startswith("re:"):
                    re.compile(entry.removeprefix("re:"))
        except (ValueError, re.error) as error:
            raise ConfigError(
                f"{key} in quantization_config of config.json is {str(entries)[:80]!r}: {error}"
            ) from error


class IgnoredModules:
    """The modules that a config leaves unquantized, matched the way engines match them.

    An fp8 list holds parts of paths (``mlp.gate``, ``model.layers.0``).  A compressed-tensors list holds full names,
    or regular expressions prefixed with ``re:``.
    """

    def __init__(self, quantization_config: Config) -> None:
        self._are_paths = quantization_config.get("quant_method") == "fp8"
        keys = FP8_LISTS if self._are_paths else ("ignore",)
        entries = [str(entry) for key in keys for entry in quantization_config.get(key) or ()]
        self._patterns = [re.compile(entry.removeprefix("re:")) for entry in entries if entry.startswith("re:")]
        self._names = {entry.removeprefix("model.").strip(".") if self._are_paths else entry for entry in entries}
        self._lengths = sorted({name.count(".") + 1 for name in self._names})

    def find(self, module: str) -> str | None:
        """Return the entry that covers ``module`` (such as ``model.layers.0.mlp.gate``), or None."""
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


def _fp8(config: Config) -> WeightFormat:
    number_format = config.get("fmt") or "e4m3"
    # Either "e4m3" (DeepSeek) or torch's dtype name "float8_e4m3fn" (MiniMax-M2).
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
    return BlockFp8(_block_size(block, "weight_block_size"), ue8m0=scale_format == "ue8m0")


def _compressed_tensors(config: Config, scale_dtype: torch.dtype) -> WeightFormat:
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
            return BlockFp8(block, marker="weight_scale")
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
