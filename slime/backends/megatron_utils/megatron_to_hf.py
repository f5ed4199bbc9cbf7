"""Converts Megatron parameters to Hugging Face tensors for pushes and exports, and quantizes those that are quantized
in ``--hf-checkpoint``.

Each family has a table of names and layouts (``models``), which ``hf_to_megatron`` reads in the other direction.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils import sglang
from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.hf_to_megatron.tensors import stored_names, tensor_names
from slime.backends.megatron_utils.models import WeightMap, find_weight_map, plain_weights
from slime.backends.megatron_utils.models.rule import to_hf
from slime.backends.megatron_utils.models.weight_layouts import VOCABULARY
from slime.train_data.model_dims import ModelDims
from slime.utils.errors import ConfigError
from slime.utils.files import read_model_config
from slime.weights.named_tensors import NamedTensors
from slime.weights.quantize import Quantizer, as_stored, quantized_names, read_quantization
from slime.weights.quantize.block_fp8 import transform_scale_ue8m0
from slime.weights.quantize.formats import BlockFp8
from slime.weights.stored_tensors import stored_codes


@dataclass(frozen=True)
class HfForm:
    """Determines the HF names and shapes of a model's weights.

    Attributes:
        model_name: HF architecture or config class, in any spelling: ``Qwen3Config``, ``qwen3``.
        dims: dimensions of the model.
        folder: ``--hf-checkpoint``; tensors that it stores more than once are converted to as many copies.  Empty for
            none.
    """

    model_name: str
    dims: ModelDims
    folder: str

    @property
    def weight_map(self) -> WeightMap:
        """The family's table."""
        return find_weight_map(self.model_name)


def hf_form(args: Namespace, model_name: str) -> HfForm:
    """Return the HF form of the model that ``args``, complete flags, describe."""
    return HfForm(model_name, model_dims(args), str(vars(args).get("hf_checkpoint") or ""))


def convert_to_hf(
    args: Namespace,
    model_name: str,
    name: str,
    param: Tensor,
    quantization_config: Mapping[str, Any] | None = None,
    transform_ue8m0: bool = True,
) -> list[tuple[str, Tensor]]:
    """Convert one whole Megatron parameter to its HF tensors, as engines started from ``--hf-checkpoint`` hold them.

    Args:
        model_name: as in :class:`HfForm`.
        name: global name, with layers counted over all pipeline stages; leading ``module.`` prefixes are ignored.
        param: the parameter, gathered over tensor parallelism, in the dtype in which it is sent; vocabulary padding
            is removed here.
        quantization_config: from the config of ``--hf-checkpoint``; weights that are quantized there are quantized
            here too.  None gives plain tensors.
        transform_ue8m0: lay out the scales of FP8 blocks as the engine's DeepGEMM expects on GPUs with power-of-two
            scales (Blackwell); False for files.

    Returns:
        HF names and tensors (views where possible), in the order q, k, v and gate, up.  Empty for an output layer tied
        to the embedding.  Embedding and output layer are repeated for each copy that ``--hf-checkpoint`` has in its
        MTP layers.

    Raises:
        ConfigError: the architecture is unknown, or weights cannot be quantized like ``--hf-checkpoint``.
        KeyError: the family has no such parameter.
    """
    form = hf_form(args, model_name)
    tensors = plain_tensors(form, name, param)
    if not quantization_config:
        return tensors
    return quantize_params(form.folder, name, tensors, quantization_config, transform_ue8m0)


def plain_tensors(form: HfForm, name: str, param: Tensor) -> list[tuple[str, Tensor]]:
    """Convert as :func:`convert_to_hf` does, without quantizing."""
    weight_map, dims = form.weight_map, form.dims
    while name.startswith("module."):
        name = name.removeprefix("module.")
    if name in VOCABULARY:
        param = param[: dims.vocab_size]
    copies = weight_map.copies_of(name, dims)
    if copies and form.folder:
        in_source = tensor_names(form.folder)
        copies = tuple(copy for copy in copies if copy in in_source)
    return [*to_hf(weight_map, name, param, dims), *((copy, param) for copy in copies)]


def checkpoint_quantizer(
    hf_checkpoint: str | Path, quantization_config: Mapping[str, Any] | None, *, dtype: torch.dtype = torch.bfloat16
) -> Quantizer | None:
    """Return the quantizer for engines started from ``--hf-checkpoint``; None for an unquantized one.

    The names in the checkpoint's files decide what is quantized; the config's list of exceptions must agree.

    Args:
        hf_checkpoint: a local folder; without an index, the headers of its files are read.
        dtype: dtype of unquantized weights in engines.

    Raises:
        ConfigError: the format is not supported; the folder is not local, has no quantized weights, or contradicts
            its config.
    """
    config = read_quantization(quantization_config, scale_dtype=dtype)
    if config is None:
        return None
    folder = str(hf_checkpoint)
    stored = stored_names(folder)
    if not stored:
        raise ConfigError(
            f"--hf-checkpoint {folder} is quantized, but it is not a folder with safetensors, whose names say what is "
            "quantized; download it and give the folder's path"
        )
    dtypes = stored_codes(folder)
    weight_format = config.format
    if isinstance(weight_format, BlockFp8) and sglang.wants_ue8m0_scales(weight_format.block):
        weight_format = replace(weight_format, ue8m0=True)
    weight_format = as_stored(weight_format, dtypes)
    quantized = quantized_names(dtypes, weight_format)
    config.warn_of_unlisted_weights(stored, quantized, plain_weights(read_model_config(folder)))
    config.check_names(quantized)
    return Quantizer(weight_format, quantized, known_names=tensor_names(folder))


_last: tuple[str, Mapping[str, Any], torch.dtype, Quantizer | None] | None = None
"""The last quantizer used: parameters are converted one at a time, and reading a checkpoint's names is slow."""


def quantize_params(
    folder: str,
    megatron_name: str,
    converted_named_params: NamedTensors,
    quantization_config: Mapping[str, Any],
    transform_ue8m0: bool = True,
) -> NamedTensors:
    """Quantize those HF tensors of one Megatron parameter that are quantized in the checkpoint.

    Args:
        folder: ``--hf-checkpoint``.
        converted_named_params: HF names and whole tensors, in the dtype in which they would be sent unquantized.
        transform_ue8m0: lay out scales as DeepGEMM expects, if the engines' GPUs need that; False for files.

    Raises:
        ConfigError: as :func:`checkpoint_quantizer`, or the checkpoint does not have one of the tensors.
    """
    global _last
    dtype = next((tensor.dtype for _, tensor in converted_named_params if tensor.dim() == 2), None)
    if dtype is None:
        return converted_named_params  # norms and biases are never quantized
    if _last is None or _last[0] != folder or _last[1] is not quantization_config or _last[2] != dtype:
        _last = (folder, quantization_config, dtype, checkpoint_quantizer(folder, quantization_config, dtype=dtype))
    quantizer = _last[3]
    if quantizer is None:
        return converted_named_params
    block = quantizer.block
    result: NamedTensors = []
    for name, tensor in converted_named_params:
        try:
            outputs = quantizer.quantize(name, tensor)
        except ConfigError as error:
            raise ConfigError(f"{megatron_name} cannot be quantized: {error}") from error
        if transform_ue8m0 and len(outputs) == 2 and block is not None and _is_packed_by_engine(block, tensor):
            (_, weight), (scale_name, scale) = outputs
            outputs = [(name, weight), (scale_name, transform_scale_ue8m0(scale, mn=weight.size(0)))]
        result += outputs
    return result


def _is_packed_by_engine(block: tuple[int, int], weight: Tensor) -> bool:
    """Return True if the engine multiplies this matrix with DeepGEMM, which takes only aligned matrices."""
    return sglang.wants_ue8m0_scales(block) and weight.size(0) % 64 == 0 and weight.size(1) % 128 == 0
