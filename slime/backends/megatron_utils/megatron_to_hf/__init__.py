"""Megatron parameters to Hugging Face tensors: what is pushed to engines and what is exported.

The correspondence of names and layouts is a table per family, ``models``, which ``hf_to_megatron`` reads in the
other direction.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.hf_to_megatron.tensors import tensor_names
from slime.backends.megatron_utils.megatron_to_hf.quantization import quantize_params
from slime.backends.megatron_utils.models import find_weight_map
from slime.backends.megatron_utils.models.rule import to_hf
from slime.backends.megatron_utils.models.weight_layouts import VOCABULARY, unpad_vocabulary
from slime.train_data.model_dims import ModelDims


def convert_to_hf(
    args: Namespace,
    model_name: str,
    name: str,
    param: Tensor,
    quantization_config: Mapping[str, Any] | None = None,
    transform_ue8m0: bool = True,
    dims: ModelDims | None = None,
) -> list[tuple[str, Tensor]]:
    """Convert one whole Megatron parameter to its HF tensors.

    Args:
        args: complete Megatron flags.
        model_name: HF architecture or config class, in any spelling: ``Qwen3Config``, ``qwen3``.
        name: name in the whole model, layers counted over all pipeline stages; leading ``module.`` are ignored.
        param: the parameter, gathered over tensor parallelism, in the dtype in which it travels; vocabulary padding is
            cut off here.
        quantization_config: of the config of ``--hf-checkpoint``, whose quantized weights are quantized here too;
            None gives plain tensors.
        transform_ue8m0: give the scales of FP8 blocks the layout in which an engine's DeepGEMM holds them, on GPUs
            where it does (Blackwell); False for files.
        dims: of the model, where the caller has them; None reads them from ``args``.

    Returns:
        HF names and tensors (views where possible), in the order q, k, v and gate, up; nothing for an output layer
        that is the embedding; embedding and output layer once more for each copy that ``--hf-checkpoint`` has in its
        MTP layers.

    Raises:
        ConfigError: the architecture is not known, or weights cannot be quantized as ``--hf-checkpoint`` is.
        KeyError: the family has no such parameter.
    """
    weight_map = find_weight_map(model_name)
    shape = dims or model_dims(args)
    while name.startswith("module."):
        name = name.removeprefix("module.")
    if name in VOCABULARY:
        param = unpad_vocabulary(param, shape)
    copies = weight_map.copies_of(name, shape)
    if copies and args.hf_checkpoint:
        in_source = tensor_names(str(args.hf_checkpoint))
        copies = tuple(copy for copy in copies if copy in in_source)
    tensors = [*to_hf(weight_map, name, param, shape), *((copy, param) for copy in copies)]
    if not quantization_config:
        return tensors
    return quantize_params(args, name, tensors, quantization_config, transform_ue8m0)
