"""OLMo 3: norms after attention and MLP, over all heads in attention; YaRN only in full-attention layers."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.matrix.case import SMALL, FamilyCase

FACTOR = 0.1 * math.log(4) + 1
"""``attention_factor``, which published configs state explicitly: YaRN's value for a factor of 4."""


def reference(folder: Path) -> torch.nn.Module:
    """Return transformers' model with plain positions in sliding-window layers, as in training and in SGLang."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain_config = copy.deepcopy(model.config)
    plain_config.rope_parameters = {"rope_type": "default", "rope_theta": model.config.rope_parameters["rope_theta"]}
    plain = type(model.model.rotary_emb)(plain_config)

    def with_plain_positions(_: Any, args: tuple[torch.Tensor], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, options | {"position_embeddings": plain(args[0], options["position_ids"])}

    for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
        if kind == "sliding_attention":
            layer.register_forward_pre_hook(with_plain_positions, with_kwargs=True)
    return model


CASE = FamilyCase(
    name="olmo3",
    config={
        **SMALL,
        "model_type": "olmo3",
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "intermediate_size": 72,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] + ["sliding_attention"] * 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "attention_factor": FACTOR,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    reference=reference,
    about="norms over 4 query heads and 2 key heads together; windows of 5 tokens in layers 1, 2, 4 and 5 of 5, YaRN "
    "in layer 3",
)
