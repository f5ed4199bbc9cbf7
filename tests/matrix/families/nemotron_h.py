"""Nemotron-H: Mamba-2, attention without positions, MLPs and experts without gates, one of them in each layer."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers.integrations import hub_kernels

from slime_plugins.models.nemotron_h.family import KINDS
from tests.matrix.case import (
    SMALL,
    FamilyCase,
    Tensors,
    load_with_transformers,
    read_config,
    read_tensors,
    write_tensors,
    write_with_transformers,
)

# The reference computes in torch; beside a GPU, transformers would fetch these from the hub.
hub_kernels._KERNEL_MODULE_MAPPING.update({name: ModuleType(name) for name in ("causal-conv1d", "mamba-ssm")})
PATTERN = "ME*-M"


def published_names(tensors: Tensors) -> Tensors:
    """The tensors that transformers 5.12.1 saved, under the names of published folders."""
    return {name.replace("backbone.embedding.", "backbone.embeddings."): tensor for name, tensor in tensors.items()}


class Reference(torch.nn.Module):
    """transformers' model without its bound on the steps of Mamba-2.

    Its plain path raises a step to ``time_step_min``; its kernels, SGLang and the model's training do not.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.model = load_with_transformers(folder)
        for layer in self.model.model.layers:
            layer.mixer.time_step_min = 0.0

    def forward(self, ids: torch.Tensor) -> Any:
        return self.model(ids)

    def save_pretrained(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        write_tensors(Path(folder), published_names(read_tensors(Path(folder))))


def write(case: FamilyCase, folder: Path, seed: int) -> None:
    """With decays of all speeds, so that some heads remember a whole sequence and others a few tokens."""
    letters = itertools.islice(itertools.cycle(PATTERN), case.config["num_hidden_layers"])
    kinds = [KINDS[letter] for letter in letters]
    write_with_transformers(replace(case, config={**case.config, "layers_block_type": kinds}), folder, seed)
    tensors = published_names(read_tensors(folder))
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor += torch.linspace(-5.0, 1.0, tensor.numel())
        elif name.endswith("dt_bias"):
            tensor += torch.linspace(1.0, -2.0, tensor.numel())
        elif name.endswith("conv1d.weight"):
            tensor *= 8.0  # three weights per channel: each must matter
    write_tensors(folder, tensors)
    config = read_config(folder)
    config["mamba_n_groups"] = config["n_groups"]  # SGLang's name
    (folder / "config.json").write_text(json.dumps(config, indent=2))


CASE = FamilyCase(
    name="nemotron_h",
    config={
        **SMALL,
        "model_type": "nemotron_h",
        "num_hidden_layers": len(PATTERN),
        "num_attention_heads": 4,
        "head_dim": 16,
        "mamba_num_heads": 12,
        "mamba_head_dim": 10,
        "ssm_state_size": 6,
        "n_groups": 4,
        "conv_kernel": 3,
        "intermediate_size": 72,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 28,
        "layer_norm_epsilon": 1e-5,
    },
    write=write,
    reference=Reference,
    has_experts=True,
    about="Mamba-2 with 3 heads a group in layers 1 and 5, grouped experts in 2, attention in 3, an MLP in 4 of 5",
)
