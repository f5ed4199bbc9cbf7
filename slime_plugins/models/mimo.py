"""MiMo-7B: Qwen2's layers, and MTP layers with different names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.flag_rules import Config, Flag
from slime.backends.megatron_utils.models.rule import Rule
from slime.train_data.model_dims import ModelDims
from slime_plugins.models.shared_weights import DENSE, relaid_rule


def _swap_halves(weight: Tensor, shape: ModelDims) -> Tensor:
    """Swap the columns of [h, 2 h] for hidden states and for embeddings; its own inverse.

    MiMo concatenates [hidden; embedding], Megatron [embedding; hidden].
    """
    left, right = weight.chunk(2, dim=1)
    return torch.cat([right, left], dim=1)


MTP = (
    Rule("enorm.weight", ("token_layernorm.weight",)),
    Rule("hnorm.weight", ("hidden_layernorm.weight",)),
    relaid_rule("eh_proj.weight", "input_proj.weight", _swap_halves, _swap_halves),
    Rule("final_layernorm.weight", ("final_layernorm.weight",)),
)

MIMO = replace(DENSE, family="MiMo", mtp=MTP, own_mtp_prefix="model.mtp_layers.{index}.")


def mtp_layers(config: Config) -> Iterator[Flag]:
    """Yield the number of MTP layers, which runs of this family build by default."""
    count = config.get("num_nextn_predict_layers")
    if count:
        yield Flag("mtp_num_layers", count, f"num_nextn_predict_layers is {count}", is_fact=False)


FAMILIES = (
    ModelFamily(
        model_types=("mimo",),
        weight_map=MIMO,
        config_class="qwen2",
        always={"add_qkv_bias": True},
        flags=mtp_layers,
    ),
)
