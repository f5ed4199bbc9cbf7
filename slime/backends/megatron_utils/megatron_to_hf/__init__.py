"""Megatron parameters to Hugging Face tensors: what is pushed to engines and what is exported.

One file per family holds a function ``(name, tensor, shape) -> [(hf_name, tensor)]``; :data:`CONVERTERS` names the
architectures that each serves.  ``hf_to_megatron`` has the inverse of every one.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from slime.backends.megatron_utils.megatron_to_hf.dense import convert_dense
from slime.backends.megatron_utils.weight_layouts import ModelShape, unpad_vocabulary
from slime.utils.errors import ConfigError

Converter = Callable[[str, Tensor, ModelShape], list[tuple[str, Tensor]]]

CONVERTERS: dict[str, Converter] = {
    # architecture, lower case, without "Config" or "ForCausalLM"
    "llama": convert_dense,
    "qwen2": convert_dense,
    "qwen3": convert_dense,
}

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def convert_to_hf(
    args: Namespace,
    model_name: str,
    name: str,
    param: Tensor,
    quantization_config: Mapping[str, Any] | None = None,
) -> list[tuple[str, Tensor]]:
    """One whole Megatron parameter as the HF tensors it stands for.

    Args:
        args: complete Megatron flags.
        model_name: HF architecture or config class, in any spelling: ``Qwen3Config``, ``qwen3``.
        name: name in the whole model, layers counted over all pipeline stages; leading ``module.`` are ignored.
        param: the parameter, gathered over tensor parallelism; vocabulary padding is cut off here.
        quantization_config: of the HF config; None pushes plain tensors.

    Returns:
        HF names and tensors (views where possible), in the order q, k, v and gate, up; nothing for an output layer
        that is the embedding.

    Raises:
        ConfigError: the architecture is not known, or its weights would have to be quantized.
        KeyError: the family has no such parameter.
    """
    convert = find_converter(model_name)
    if quantization_config:
        method = quantization_config.get("quant_method")
        raise ConfigError(
            f"--hf-checkpoint is quantized ({method}); only unquantized weights can be pushed or exported; point "
            "--hf-checkpoint at an unquantized checkpoint."
        )
    shape = ModelShape.from_args(args)
    while name.startswith("module."):
        name = name.removeprefix("module.")
    if name in _VOCABULARY:
        param = unpad_vocabulary(param, shape)
    return convert(name, param, shape)


def find_converter(model_name: str) -> Converter:
    """The converter of an architecture.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    key = re.sub(r"[-_]", "", model_name).lower()
    key = key.removesuffix("config").removesuffix("forcausallm")
    if key not in CONVERTERS:
        raise ConfigError(
            f"--model-name (or the class of --hf-checkpoint's config) is {model_name!r}; weights can be converted for "
            f"{', '.join(sorted(CONVERTERS))}."
        )
    return CONVERTERS[key]
