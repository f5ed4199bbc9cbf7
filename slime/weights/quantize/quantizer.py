"""Named tensors on their way to engines that hold some of them quantized."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from slime.utils.errors import ConfigError
from slime.weights.named_tensors import Header, NamedTensors
from slime.weights.quantize.config import IgnoredModules, read_format
from slime.weights.quantize.formats import Shape, WeightFormat
from slime.weights.quantize.offline_rules import SUFFIX, is_quantized_offline

logger = logging.getLogger(__name__)


class Quantizer:
    """Quantizes the weights that a checkpoint has quantized, in the checkpoint's format.

    Args:
        weight_format: the format.
        quantized_names: ``X.weight`` of all quantized weights.
        known_names: ``X.weight`` of everything that the checkpoint has, quantized or not; a weight that is not among
            them is an error, because nobody can tell how engines hold it.  None trusts ``quantized_names`` alone.
        check_finite: NaN and infinities are errors.  It costs a wait for the device per tensor.
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        quantized_names: Collection[str],
        *,
        known_names: Collection[str] | None = None,
        check_finite: bool = False,
    ) -> None:
        self.format = weight_format
        self.quantized_names = frozenset(quantized_names)
        self._known_names = None if known_names is None else frozenset(known_names)
        self._check_finite = check_finite

    def is_quantized(self, name: str) -> bool:
        """Whether the engines hold the HF tensor ``name`` quantized.

        Raises:
            ConfigError: it is a weight that the checkpoint does not have.
        """
        if name in self.quantized_names:
            return True
        if self._known_names is not None and name.endswith(SUFFIX) and name not in self._known_names:
            raise ConfigError(
                f"the quantized --hf-checkpoint has no tensor {name}, so that nobody can tell whether engines hold it "
                "quantized; point --hf-checkpoint at a checkpoint with all the layers that the flags ask for "
                "(--num-layers, --mtp-num-layers)"
            )
        return False

    def outputs(self, name: str, shape: Shape) -> list[Header]:
        """Name, shape and dtype of what :meth:`quantize` makes of a quantized weight, in its order."""
        headers = self.format.outputs(name, tuple(shape))
        return [(_part_name(name, part), part_shape, dtype) for part, (part_shape, dtype) in headers.items()]

    def quantize(self, name: str, tensor: Tensor) -> NamedTensors:
        """A tensor as it travels: itself, or what stands for it quantized.

        Args:
            name: HF name.
            tensor: whole, in the dtype in which it would travel unquantized.

        Raises:
            ConfigError: the format cannot hold the shape, or the checkpoint does not have the tensor.
            DataError: ``check_finite`` is given and the tensor is not finite.
        """
        if not self.is_quantized(name):
            return [(name, tensor)]
        parts = self.format.quantize(name, tensor, check_finite=self._check_finite)
        return [(_part_name(name, part), value) for part, value in parts.items()]


def make_quantizer(
    quantization_config: Mapping[str, Any] | None,
    quantized_names: Collection[str],
    *,
    known_names: Collection[str] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ue8m0: bool = False,
    check_finite: bool = False,
) -> Quantizer | None:
    """The quantizer for a checkpoint; None for an unquantized one.

    Args:
        quantization_config: of its HF config.
        quantized_names: ``X.weight`` of all that is quantized: :func:`quantized_names`, or what a converter chooses.
        known_names: as :class:`Quantizer` has it.
        dtype: in which engines hold unquantized weights.
        ue8m0: scales of fp8 blocks are powers of two, even where the config does not ask for them.
        check_finite: NaN and infinities are errors.

    Raises:
        ConfigError: the format is not supported, or the config says that something is left alone that is quantized.
    """
    weight_format = read_format(quantization_config, scale_dtype=dtype, ue8m0=ue8m0)
    if weight_format is None or quantization_config is None:
        return None
    check_ignored_modules(quantization_config, quantized_names)
    return Quantizer(weight_format, quantized_names, known_names=known_names, check_finite=check_finite)


def quantized_names(stored_names: Collection[str], weight_format: WeightFormat) -> frozenset[str]:
    """``X.weight`` of all weights that a checkpoint has quantized.

    Args:
        stored_names: of the tensors in its files.
        weight_format: what its config says.

    Raises:
        ConfigError: there are none.
    """
    marker = f".{weight_format.marker}"
    found = frozenset(name.removesuffix(marker) + SUFFIX for name in stored_names if name.endswith(marker))
    if not found:
        raise ConfigError(
            f"the config.json of --hf-checkpoint has a quantization_config, but none of its {len(stored_names)} "
            f"tensors is quantized (called *{marker}); convert the checkpoint again, or remove the quantization_config"
        )
    return found


def check_ignored_modules(quantization_config: Mapping[str, Any], quantized_names: Collection[str]) -> None:
    """Refuse a config whose list of unquantized modules has one that is quantized: engines would drop its scales.

    Raises:
        ConfigError: naming the module and the entry of the list.
    """
    ignored = IgnoredModules(quantization_config)
    for name in sorted(quantized_names):
        entry = ignored.find(name.removesuffix(SUFFIX))
        if entry is not None:
            raise ConfigError(
                f"--hf-checkpoint has {name} quantized, but its quantization_config lists {entry!r} among the modules "
                "that are not; correct the list in config.json, or convert the checkpoint again"
            )


def warn_of_unlisted_weights(
    quantization_config: Mapping[str, Any], stored_names: Collection[str], quantized_names: Collection[str]
) -> list[str]:
    """Weights that look as if they should be quantized, are not, and are not listed as such; warned of when any."""
    ignored = IgnoredModules(quantization_config)
    unlisted = sorted(
        name
        for name in stored_names
        if name not in quantized_names
        and is_quantized_offline(name)
        and ignored.find(name.removesuffix(SUFFIX)) is None
    )
    if unlisted:
        logger.warning(
            "--hf-checkpoint has %d matrices unquantized that its quantization_config does not list as such, for "
            "example %s; engines may read them as quantized ones.", len(unlisted), unlisted[0],
        )  # fmt: skip
    return unlisted


def _part_name(name: str, part: str) -> str:
    return f"{name.removesuffix(SUFFIX)}.{part}"
