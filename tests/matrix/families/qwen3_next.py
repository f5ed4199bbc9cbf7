"""Qwen3-Next: gated delta nets, every third layer with gated attention; a gated shared expert."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from tests.matrix.case import SMALL, FamilyCase, read_config, read_tensors, write_tensors
from tests.matrix.flags import model_flags
from tests.matrix.references.mtp import ModelWithMtp, MtpFormat, mtp_extra_loss, mtp_flags, write_with_mtp

SPEC = ("--spec", "slime_plugins.models.qwen3_next", "get_qwen3_next_spec")


MTP_FORMAT = MtpFormat(
    prefix=lambda index, num_layers: "mtp.",
    inner="layers.0.",
    norm_centre=1.0,
    enorm="pre_fc_norm_embedding.weight",
    hnorm="pre_fc_norm_hidden.weight",
    eh_proj="fc.weight",
    final_norm="norm.weight",
    copies=(),
)


def write(case: FamilyCase, folder: Path, seed: int) -> None:
    """With decays of all speeds, so that some heads remember a whole sequence and others a few tokens.

    Keys are similar to their queries: the first token's output is a value times their product, and is normed.  If the
    product were nearly zero, that would show nothing but the rounding of fp32.
    """
    interval, num_layers = case.config["full_attention_interval"], case.config["num_hidden_layers"]
    kinds = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(num_layers)]
    with_kinds = replace(case, config={**case.config, "layer_types": [*kinds, "full_attention"]})
    write_with_mtp(with_kinds, folder, seed, MTP_FORMAT)
    config = read_config(folder)
    del config["layer_types"]  # published configs have the interval
    config["full_attention_interval"] = interval
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    heads, width = case.config["linear_num_key_heads"], case.config["linear_key_head_dim"]
    tensors = read_tensors(folder)
    for name, tensor in tensors.items():
        if "norm" in name and not name.endswith("linear_attn.norm.weight"):
            tensor -= 1.0  # stored as the distance from one
        elif name.endswith("A_log"):
            tensor += torch.linspace(-5.0, 1.0, tensor.numel())
        elif name.endswith("dt_bias"):
            tensor += torch.linspace(1.0, -2.0, tensor.numel())
        elif name.endswith("in_proj_qkvz.weight"):
            by_head = tensor.view(heads, -1, tensor.size(1))
            by_head[:, width : 2 * width] += 3 * by_head[:, :width]
        elif name.endswith("conv1d.weight"):
            tensor *= 8.0  # three weights per channel: each must matter
            tensor[heads * width : 2 * heads * width] += 3 * tensor[: heads * width]
    write_tensors(folder, tensors)


CASE = FamilyCase(
    name="qwen3_next",
    config={
        **SMALL,
        "model_type": "qwen3_next",
        "num_hidden_layers": 5,
        "full_attention_interval": 3,  # the layer after the last also has full attention
        "num_nextn_predict_layers": 1,
        "head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 12,
        "linear_key_head_dim": 18,
        "linear_value_head_dim": 22,
        "linear_conv_kernel_dim": 3,
        "intermediate_size": 72,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "num_experts": 10,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.25,
    },
    flags=lambda folder: model_flags(folder, *mtp_flags(folder)),
    write=write,
    reference=lambda folder: ModelWithMtp(folder, MTP_FORMAT),
    extra_loss=mtp_extra_loss,
    has_experts=True,
    about="delta nets with 3 value heads a key head; gated attention in layer 3 of 5 and in the trained MTP layer",
)
