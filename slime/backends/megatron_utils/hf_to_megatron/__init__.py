"""Loads Hugging Face checkpoints into a Megatron model; each rank reads only what it holds.

Each family has a table of names and layouts (``models``), which ``megatron_to_hf`` reads in the other direction.
"""

from __future__ import annotations

import logging
import re
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.hf_to_megatron.tensors import HfTensors, stored_dtypes
from slime.backends.megatron_utils.layers.value_head import is_of_value_head
from slime.backends.megatron_utils.models import WeightMap, family_of, family_of_folder
from slime.backends.megatron_utils.models.rule import EMBEDDING, FP32, OUTPUT_LAYER, from_hf
from slime.backends.megatron_utils.models.weight_layouts import VOCABULARY, pad_vocabulary, tensor_parallel_slice
from slime.backends.megatron_utils.parameters import Shard, iter_global_parameters, tensor_parallel_group
from slime.train_data.model_dims import ModelDims
from slime.utils.errors import DataError
from slime.utils.files import read_model_config
from slime.weights.named_tensors import check_finite, config_dtype, dtype_name

logger = logging.getLogger(__name__)

_EXPERT = re.compile(r"\.experts\.\d+\.")


def keep_fp32(model: Sequence[torch.nn.Module], folder: str, model_name: str | None, dims: ModelDims) -> None:
    """Keep parameters in fp32, and mark them for pushes, that ``--hf-checkpoint`` stores in fp32 although the dtype of
    its config is narrower.

    If the whole folder is in fp32, the precision of the run applies, except to parameters that every engine holds in
    fp32.
    """
    dtypes = stored_dtypes(folder)
    if torch.float32 not in dtypes.values() or not (model_name or family_of(read_model_config(folder))):
        return
    weight_map = family_of_folder(folder, model_name).weight_map
    is_mixed = config_dtype(read_model_config(folder)) != torch.float32
    for name, shard in iter_global_parameters(model):
        is_of_layer = name.startswith(("decoder.", "mtp.")) and name.endswith(FP32)
        if not (is_of_layer or name.endswith(weight_map.computed_in_fp32)):
            continue
        _, hf_names = weight_map.find(name, dims)
        if all(
            dtypes.get(one) == torch.float32 and (is_mixed or one.endswith(weight_map.engine_fp32)) for one in hf_names
        ):
            shard.parameter.stays_fp32 = True
            shard.parameter.data = shard.parameter.data.float()


@torch.no_grad()
def load_hf_weights(args: Namespace, model: Sequence[torch.nn.Module], path: str | Path) -> None:
    """Fill this rank's parameters from a HF checkpoint.  Not a collective.

    Args:
        model: this rank's chunks, wrapped or not; a critic's value head keeps its values.
        path: folder with ``config.json`` and safetensors; block-quantized FP8 is dequantized.

    Raises:
        ConfigError: the model type is unknown.
        DataError: a tensor is missing (also a KeyError), has another shape, or is not used by the model.
    """
    weight_map = family_of_folder(path, args.model_name).weight_map
    shape = model_dims(args)
    start = time.monotonic()
    num_bytes = 0
    with HfTensors(path, verify=args.verify_checkpoint) as tensors:
        for name, shard in iter_global_parameters(model, with_copies=True):
            if is_of_value_head(shard.parameter):
                continue
            part = read_shard(name, shard, tensors, weight_map, shape)
            shard.tensor.copy_(part)
            num_bytes += part.numel() * shard.tensor.element_size()
        check_all_used(tensors, weight_map, shape)
    elapsed = time.monotonic() - start
    logger.info("Loaded %.2f GiB of weights from %s in %.1f s.", num_bytes / 2**30, path, elapsed)


def read_shard(name: str, shard: Shard, tensors: HfTensors, weight_map: WeightMap, shape: ModelDims) -> Tensor:
    """Return this rank's shard from the checkpoint, in the checkpoint's dtype.

    Raises:
        DataError: a tensor is missing (also a KeyError) or has another shape.
    """
    full = _read_whole(name, tensors, weight_map, shape)
    _check_copies(tensors, weight_map.copies_of(name, shape), full)
    if name == EMBEDDING and shape.has_tied_embeddings:
        _check_head(tensors, weight_map.find(OUTPUT_LAYER, shape)[1][0], full)
    if name in VOCABULARY:
        full = pad_vocabulary(full, shape)
    part = local_part(shard, full, is_gated=shape.is_gated)
    if part.shape != shard.tensor.shape:
        raise DataError(
            f"{name} is {tuple(shard.tensor.shape)} on this rank; the checkpoint {tensors.folder} gives "
            f"{tuple(part.shape)}; the model flags are not those of the checkpoint."
        )
    return part


def _read_whole(name: str, tensors: HfTensors, weight_map: WeightMap, shape: ModelDims) -> Tensor:
    """Return a whole parameter; if its tensors do not fit together, the error names them with their shapes."""
    read: dict[str, list[int]] = {}
    being_read: list[str] = []

    def get(hf_name: str) -> Tensor:
        being_read.append(hf_name)
        tensor = _checked(hf_name, tensors)
        being_read.pop()
        read[hf_name] = list(tensor.shape)
        return tensor

    try:
        return from_hf(weight_map, name, get, shape)
    except KeyError as error:
        if being_read:
            raise
        raise DataError(
            f"{tensors.folder} is a model of the family {weight_map.family}, which has no {name}; the model flags are "
            "those of another."
        ) from error
    except (RuntimeError, ValueError, IndexError) as error:
        if being_read:
            raise
        parts = ", ".join(f"{hf_name} {sizes}" for hf_name, sizes in read.items())
        reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}; compare the model flags."
        raise DataError(f"{tensors.where(next(iter(read), ''))}: {parts} do not make up {name}: {reason}") from error


def _checked(name: str, tensors: HfTensors) -> Tensor:
    """Return a tensor of the checkpoint, after checking that it is floating-point."""
    tensor = tensors.get(name)
    if not tensor.is_floating_point():
        raise DataError(
            f"{tensors.where(name)}: {name} is {dtype_name(tensor.dtype)}; a weight is a floating-point tensor "
            "(bfloat16, float16, float32, or quantized as config.json says). Convert the checkpoint again."
        )
    check_finite(tensor, f"{tensors.where(name)}: {name}")
    return tensor


def local_part(shard: Shard, full: Tensor, *, is_gated: bool) -> Tensor:
    """Return the slice of a whole tensor (vocabulary padding included) that this rank's parameter holds.

    Args:
        is_gated: the MLP's first matrix concatenates gate and up, each sharded separately.
    """
    if shard.split_dim is None:
        return full
    group = tensor_parallel_group(shard)
    is_gate_up = is_gated and ".linear_fc1." in shard.name
    return tensor_parallel_slice(
        full, dim=shard.split_dim, rank=group.rank(), size=group.size(), is_gate_up=is_gate_up
    )


def _check_copies(tensors: HfTensors, names: Sequence[str], original: Tensor) -> None:
    """Warn if tensors that should be copies of a parameter differ from it; the copies are not used."""
    for name in names:
        if name in tensors and not torch.equal(tensors.get(name), original):
            logger.warning(
                "%s: %s differs from the model's own tensor, of which it should be a copy; it is not used, and "
                "exports under its name contain the model's own tensor.", tensors.folder, name,
            )  # fmt: skip


def _check_head(tensors: HfTensors, head: str, embedding: Tensor) -> None:
    """Reject an output projection that differs from the embedding it is tied to: it would not be trained."""
    if head in tensors and not torch.equal(tensors.get(head), embedding):
        raise DataError(
            f"{tensors.where(head)}: {head} differs from the embedding, and tie_word_embeddings of config.json says "
            "that they are one; set it to false there (--untie-embeddings-and-output-weights), or remove the tensor."
        )


def check_all_used(tensors: HfTensors, weight_map: WeightMap, shape: ModelDims) -> None:
    """Reject a checkpoint with tensors that the model does not have, such as biases, query norms, or a second head.

    A part (such as a layer) from which nothing was read belongs to another pipeline stage, or is optional.  Of any
    other part, every tensor must have been read.  All experts of a layer count as one, because other ranks read most
    of them.  Outside of these parts the family's weight map lists the allowed tensors.
    """
    copies = {copy for name in weight_map.mtp_copies for copy in weight_map.copies_of(name, shape)}
    read = {_EXPERT.sub(".experts.*.", name) for name in tensors.read}
    parts = {weight_map.part_of(name) for name in tensors.read - copies}
    unused = [
        name
        for name in tensors.names()
        if (part := weight_map.part_of(name)) is not None
        and part in parts
        and _EXPERT.sub(".experts.*.", name) not in read
        and name not in copies
        and not weight_map.is_untrained(name)
        and not any(re.fullmatch(pattern, name) for pattern in (*weight_map.ignored, *weight_map.spare))
    ]
    unused += [name for name in tensors.names() if name not in unused and not weight_map.has_place(name, shape)]
    unused += [f"{name}[{shape.num_experts}]" for name, rows in tensors.rows.items() if rows > shape.num_experts]
    if unused:
        raise DataError(
            f"{tensors.where(unused[0])}: {len(unused)} tensors have no place in the model, such as {unused[0]}; "
            "compare the model flags (--num-layers, --add-qkv-bias, --qk-layernorm, ...) with the file of "
            "scripts/models."
        )
