"""Kimi-K2: DeepSeek-V3's layout with one expert group, and YaRN with the narrowest possible ramp."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.matrix.case import FamilyCase, random_tensor, write_tensors
from tests.matrix.references import kimi_k2


def write(case: FamilyCase, folder: Path, seed: int) -> None:
    """Config like the published one (rotary settings at the top level), tensors of the reference."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**case.config, "architectures": [case.architecture], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tensor.shape for name, tensor in kimi_k2.KimiK2(config).state_dict().items()}
    write_tensors(folder, {name: random_tensor(name, shape, generator) for name, shape in shapes.items()})


CASE = FamilyCase(
    name="kimi_k2",
    architecture="DeepseekV3ForCausalLM",
    config={
        "model_type": "kimi_k2",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 12,
        "v_head_dim": 8,
        "intermediate_size": 56,
        "moe_intermediate_size": 16,
        "n_routed_experts": 10,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "vocab_size": 139,
        "max_position_embeddings": 256,
        "rope_theta": 50.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16.0,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
        },
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    write=write,
    reference=kimi_k2.load,
    has_experts=True,
    about="rotary settings at the top of an old config, a YaRN ramp of one dimension, 3 of 10 experts",
)
