"""Seed-OSS: Llama's layers, with biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.flag_rules import PLAIN
from slime_plugins.models.shared_weights import DENSE

FAMILIES = (
    ModelFamily(
        model_types=("seed_oss",),
        weight_map=replace(DENSE, family="Seed-OSS"),
        fixed={**PLAIN, "attention_bias": True, "attention_out_bias": False},
    ),
)
