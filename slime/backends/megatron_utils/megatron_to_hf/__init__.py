"""Megatron parameters to Hugging Face tensors: what is pushed to engines and what is exported.

The correspondence of names and layouts is a table per family, ``models``, which ``hf_to_megatron`` reads in the
other direction.
"""

from __future__ import annotations

from argparse import Namespace

from torch import Tensor

from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.hf_to_megatron.tensors import tensor_names
from slime.backends.megatron_utils.models import find_weight_map
from slime.backends.megatron_utils.models.rule import to_hf
from slime.backends.megatron_utils.models.weight_layouts import unpad_vocabulary
from slime.train_data.model_dims import ModelDims

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def convert_to_hf(
    args: Namespace,
    model_name: str,
    name: str,
    param: Tensor,
    dims: ModelDims | None = None,
) -> list[tuple[str, Tensor]]:
    """Convert one whole Megatron parameter to its HF tensors.

    Args:
        args: complete Megatron flags.
        model_name: HF architecture or config class, in any spelling: ``Qwen3Config``, ``qwen3``.
        name: name in the whole model, layers counted over all pipeline stages; leading ``module.`` are ignored.
        param: the parameter, gathered over tensor parallelism, in the dtype in which it travels; vocabulary padding is
            cut off here.
        dims: of the model, where the caller has them; None reads them from ``args``.

    Returns:
        HF names and tensors (views where possible), in the order q, k, v and gate, up; nothing for an output layer
        that is the embedding; embedding and output layer once more for each copy that ``--hf-checkpoint`` has in its
        MTP layers.

    Raises:
        ConfigError: the architecture is not known.
        KeyError: the family has no such parameter.
    """
    weight_map = find_weight_map(model_name)
    shape = dims or model_dims(args)
    while name.startswith("module."):
        name = name.removeprefix("module.")
    if name in _VOCABULARY:
        param = unpad_vocabulary(param, shape)
    copies = weight_map.copies_of(name, shape)
    if copies and args.hf_checkpoint:
        in_source = tensor_names(str(args.hf_checkpoint))
        copies = tuple(copy for copy in copies if copy in in_source)
    return [*to_hf(weight_map, name, param, shape), *((copy, param) for copy in copies)]
