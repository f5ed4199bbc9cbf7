"""Hugging Face checkpoints into a Megatron model, each rank reading only what it holds.

One file per family holds a function ``(name, tensors, shape) -> whole Megatron tensor``; :data:`LOADERS` names the
model types that each serves.  ``megatron_to_hf`` has the inverse of every one.
"""

from __future__ import annotations

import json
import logging
import re
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils.hf_to_megatron.dense import load_dense
from slime.backends.megatron_utils.hf_to_megatron.tensors import HfTensors
from slime.backends.megatron_utils.weight_layouts import ModelShape, pad_vocabulary, tensor_parallel_slice
from slime.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

Loader = Callable[[str, HfTensors, ModelShape], Tensor]

LOADERS: dict[str, Loader] = {
    # model_type of config.json
    "llama": load_dense,
    "qwen2": load_dense,
    "qwen3": load_dense,
}

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def supports_hf_weight_loading(path: str | Path) -> bool:
    """Whether ``path`` is a folder with a HF config and safetensors; ``load_hf_weights`` names families it lacks."""
    folder = Path(path)
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def find_loader(path: str | Path) -> Loader:
    """The loader for a checkpoint's model type.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    model_type = json.loads((Path(path) / "config.json").read_text()).get("model_type")
    if model_type not in LOADERS:
        raise ConfigError(
            f"{path} is a checkpoint of model_type {model_type!r}; Hugging Face weights can be loaded for "
            f"{', '.join(sorted(LOADERS))}."
        )
    return LOADERS[model_type]


@torch.no_grad()
def load_hf_weights(args: Namespace, model: Sequence[torch.nn.Module], path: str | Path) -> None:
    """Fill this rank's parameters from a HF checkpoint.  Not a collective.

    Args:
        args: complete Megatron flags.
        model: this rank's chunks, wrapped or not; the value head of a critic keeps its values.
        path: folder with ``config.json`` and safetensors; block-quantized fp8 is dequantized.

    Raises:
        ConfigError: the model type is not known.
        DataError: a tensor is missing (also a KeyError), has another shape, or would be left unused.
    """
    load = find_loader(path)
    shape = ModelShape.from_args(args)
    start = time.monotonic()
    layers: set[int] = set()
    num_bytes = 0
    with HfTensors(path) as tensors:
        for name, parameter in iter_global_parameters(model):
            if name == "output_layer.weight" and parameter.size(0) == 1:
                continue
            match = _LAYER.fullmatch(name)
            if match:
                layers.add(int(match[1]))
            full = load(name, tensors, shape)
            if name in _VOCABULARY:
                full = pad_vocabulary(full, shape)
            part = local_part(name, full, parameter)
            if part.shape != parameter.shape:
                raise DataError(
                    f"{name} is {tuple(parameter.shape)} on this rank; the checkpoint {path} gives "
                    f"{tuple(part.shape)}; the model flags are not those of the checkpoint."
                )
            parameter.copy_(part)
            num_bytes += parameter.numel() * parameter.element_size()
        _check_all_used(tensors, layers)
    elapsed = time.monotonic() - start
    logger.info("Loaded %.2f GiB of weights from %s in %.1f s.", num_bytes / 2**30, path, elapsed)


def iter_global_parameters(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters, with layers counted over the whole model."""
    for chunk in model:
        inner: Any = chunk
        while hasattr(inner, "module"):
            inner = inner.module
        for name, parameter in inner.named_parameters():
            match = _LAYER.fullmatch(name)
            if match:
                layer = inner.decoder.layers[int(match[1])]
                name = f"decoder.layers.{layer.layer_number - 1}.{match[2]}"
            yield name, parameter


def local_part(name: str, full: Tensor, parameter: Any) -> Tensor:
    """The slice of a whole tensor (vocabulary padding included) that this rank's parameter holds."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    return tensor_parallel_slice(
        full,
        dim=parameter.partition_dim,
        rank=mpu.get_tensor_model_parallel_rank(),
        size=mpu.get_tensor_model_parallel_world_size(),
        is_gate_up=".linear_fc1." in name,
    )


def _check_all_used(tensors: HfTensors, layers: set[int]) -> None:
    """Refuse a checkpoint whose layers have tensors that the model has not, such as biases or query norms."""
    unused = []
    for name in tensors.names():
        match = _HF_LAYER.match(name)
        if match and int(match[1]) in layers and name not in tensors.read and not name.endswith("inv_freq"):
            unused.append(name)
    if unused:
        raise DataError(
            f"{tensors.folder} has {len(unused)} tensors that the model has no place for, such as {unused[0]}; "
            "compare the model flags (--add-qkv-bias, --qk-layernorm, ...) with the file of scripts/models."
        )
