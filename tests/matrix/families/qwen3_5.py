"""Qwen3.5, dense and with experts: Qwen3-Next's layers in a folder with a vision tower, which is not trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tests.matrix.case import SMALL, FamilyCase, Tensors
from tests.matrix.families.qwen3_next import MTP_FORMAT
from tests.matrix.flags import model_flags
from tests.matrix.references.composite import CompositeModel, as_pushed, write_composite
from tests.matrix.references.mtp import mtp_extra_loss


def write(case: FamilyCase, folder: Path, seed: int) -> None:
    """With decays of all speeds, and keys similar to their queries; see ``families/qwen3_next.py``."""
    interval, num_layers = case.config["full_attention_interval"], case.config["num_hidden_layers"]
    kinds = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(num_layers)]
    keys = case.config["linear_num_key_heads"] * case.config["linear_key_head_dim"]

    def change(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if "norm" in name and not name.endswith("linear_attn.norm.weight"):
                tensor -= 1.0  # stored as the distance from one
            elif name.endswith("A_log"):
                tensor += torch.linspace(-5.0, 1.0, tensor.numel())
            elif name.endswith("dt_bias"):
                tensor += torch.linspace(1.0, -2.0, tensor.numel())
            elif name.endswith("in_proj_qkv.weight"):
                tensor[keys : 2 * keys] += 3 * tensor[:keys]
            elif name.endswith("conv1d.weight"):
                tensor *= 8.0  # three weights per channel: each must matter
                tensor[keys : 2 * keys] += 3 * tensor[:keys]

    with_kinds = replace(case, config={**case.config, "layer_types": [*kinds, "full_attention"]})
    write_composite(with_kinds, folder, seed, MTP_FORMAT, change)


DENSE = FamilyCase(
    name="qwen3_5",
    config={
        **SMALL,
        "model_type": "qwen3_5",
        "num_hidden_layers": 5,
        "full_attention_interval": 3,
        "num_nextn_predict_layers": 1,
        "head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 12,
        "linear_key_head_dim": 18,
        "linear_value_head_dim": 22,
        "linear_conv_kernel_dim": 3,
        "intermediate_size": 72,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
            **{"mrope_section": [1, 1, 0], "mrope_interleaved": True},
        },
        "tie_word_embeddings": True,
    },
    architecture="Qwen3_5ForConditionalGeneration",
    flags=lambda folder: model_flags(folder, "--mtp-num-layers", "1", "--enable-mtp-training"),
    write=write,
    reference=lambda folder: CompositeModel(folder, MTP_FORMAT),
    pushed=as_pushed,
    extra_loss=mtp_extra_loss,
    about="a folder with a vision tower; delta nets of four projections; tied embeddings; the MTP layer trained",
)
EXPERTS = replace(
    DENSE,
    name="qwen3_5_moe",
    config={
        **{key: value for key, value in DENSE.config.items() if key != "intermediate_size"},
        "model_type": "qwen3_5_moe",
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "num_experts": 10,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": False,
    },
    architecture="Qwen3_5MoeForConditionalGeneration",
    has_experts=True,
    about="the same with experts, stacked in the folder, and a gated shared one",
)
CASES = (DENSE, EXPERTS)
