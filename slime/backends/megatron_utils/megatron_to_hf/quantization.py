"""The exported tensors that engines hold quantized: those that are quantized in ``--hf-checkpoint``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slime.backends.megatron_utils import sglang
from slime.backends.megatron_utils.hf_to_megatron.tensors import stored_names, tensor_names
from slime.utils.errors import ConfigError
from slime.weights.quantize import Quantizer, make_quantizer, quantized_names, read_format
from slime.weights.quantize.formats import BlockFp8
from slime.weights.quantize.quantizer import warn_of_unlisted_weights


def checkpoint_quantizer(
    hf_checkpoint: str | Path, quantization_config: Mapping[str, Any] | None, *, dtype: torch.dtype = torch.bfloat16
) -> Quantizer | None:
    """Return the quantizer for engines started from ``--hf-checkpoint``; None for an unquantized one.

    The names in the checkpoint's files decide what is quantized; the config's list of exceptions must agree.

    Args:
        hf_checkpoint: a local folder; without an index its files' headers are read.
        quantization_config: of its config.json.
        dtype: in which engines hold unquantized weights.

    Raises:
        ConfigError: the format is not supported, the folder is not local, holds nothing quantized, or contradicts its
            own config.
    """
    weight_format = read_format(quantization_config, scale_dtype=dtype)
    if weight_format is None or quantization_config is None:
        return None
    folder = str(hf_checkpoint)
    stored = stored_names(folder)
    if not stored:
        raise ConfigError(
            f"--hf-checkpoint {folder} is quantized, and no folder with safetensors, whose names say what is "
            "quantized; download it and give the folder's path"
        )
    quantized = quantized_names(stored, weight_format)
    warn_of_unlisted_weights(quantization_config, stored, quantized)
    return make_quantizer(
        quantization_config,
        quantized,
        known_names=tensor_names(folder),
        dtype=dtype,
        ue8m0=isinstance(weight_format, BlockFp8) and sglang.wants_ue8m0_scales(weight_format.block),
    )
