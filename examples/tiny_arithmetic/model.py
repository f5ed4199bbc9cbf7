"""A random Qwen3 model with 0.3 million parameters, written as a Hugging Face checkpoint.

The tensors are written directly, without transformers' model code or the trainer.  The dimensions are those of
``scripts/models/tiny-arithmetic.sh``.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from examples.tiny_arithmetic.tokenizer import END_ID, PAD_ID, VOCAB_SIZE

NUM_LAYERS = 2
HIDDEN_SIZE = 128
FFN_SIZE = 256
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 32
INIT_STD = 0.08
"""Larger than the usual 0.02: a model of this size then learns the sums several times faster."""

HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": FFN_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": INIT_STD,
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
    "use_cache": True,
    "use_sliding_window": False,
    "torch_dtype": "float32",
}


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    """Return HF name -> float32 tensor: normal matrices with standard deviation ``INIT_STD``, and norms of 1."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * INIT_STD

    weights = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN_SIZE)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(HIDDEN_SIZE),
            prefix + "self_attn.q_proj.weight": matrix(NUM_HEADS * HEAD_DIM, HIDDEN_SIZE),
            prefix + "self_attn.k_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            prefix + "self_attn.v_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN_SIZE, NUM_HEADS * HEAD_DIM),
            prefix + "self_attn.q_norm.weight": torch.ones(HEAD_DIM),
            prefix + "self_attn.k_norm.weight": torch.ones(HEAD_DIM),
            prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN_SIZE),
            prefix + "mlp.gate_proj.weight": matrix(FFN_SIZE, HIDDEN_SIZE),
            prefix + "mlp.up_proj.weight": matrix(FFN_SIZE, HIDDEN_SIZE),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN_SIZE, FFN_SIZE),
        }
    weights["model.norm.weight"] = torch.ones(HIDDEN_SIZE)
    weights["lm_head.weight"] = matrix(VOCAB_SIZE, HIDDEN_SIZE)
    return weights


def write_model(folder: Path, seed: int) -> int:
    """Write config and weights into ``folder``; return the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = random_weights(seed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(HF_CONFIG, indent=2) + "\n")
    generation = {"bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": PAD_ID, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return sum(tensor.numel() for tensor in weights.values())
