"""Small random model folders of several shards, with the names of real families."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = {"q_proj": (192, 160), "k_proj": (64, 160), "v_proj": (64, 160), "o_proj": (160, 192)}
MLP = {"gate_proj": (320, 160), "up_proj": (320, 160), "down_proj": (160, 320)}
MLA = {
    "q_a_proj": (96, 160),
    "q_b_proj": (192, 96),
    "kv_a_proj_with_mqa": (96, 160),
    "kv_b_proj": (256, 64),
    "o_proj": (160, 192),
    "indexer.wq_b": (128, 96),
    "indexer.wk": (64, 160),
}
PLAIN_MLA = {
    "q_a_layernorm": (96,),
    "kv_a_layernorm": (64,),
    "indexer.k_norm": (64,),
    "indexer.weights_proj": (4, 160),
}
NORMS = ("input_layernorm", "post_attention_layernorm")

QUANTIZED: dict[str, tuple[str, ...]] = {
    "qwen3": (*(f"self_attn.{name}" for name in ATTENTION), *(f"mlp.{name}" for name in MLP)),
    "qwen3_moe": (
        *(f"self_attn.{name}" for name in ATTENTION),
        *(f"mlp.experts.{expert}.{name}" for expert in range(2) for name in MLP),
    ),
    "deepseek_v32": (
        *(f"self_attn.{name}" for name in MLA),
        *(f"mlp.experts.{expert}.{name}" for expert in range(2) for name in MLP),
        *(f"mlp.shared_experts.{name}" for name in MLP),
    ),
}
"""Family -> the modules of a layer that a converter quantizes, written by hand."""


def tensors_of(family: str, layers: int = 3) -> dict[str, Tensor]:
    """All tensors of a model, in bf16 except for the router's bias."""
    generator = torch.Generator().manual_seed(7)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.08).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": weight(256, 160), "model.norm.weight": weight(160)}
    tensors["lm_head.weight"] = weight(256, 160)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.{norm}.weight": weight(160) for norm in NORMS}
        attention = MLA if family == "deepseek_v32" else ATTENTION
        tensors |= {f"{at}.self_attn.{name}.weight": weight(*shape) for name, shape in attention.items()}
        if family == "qwen3":
            tensors |= {f"{at}.self_attn.{name}_norm.weight": weight(64) for name in "qk"}
            tensors |= {f"{at}.mlp.{name}.weight": weight(*shape) for name, shape in MLP.items()}
            continue
        tensors[f"{at}.mlp.gate.weight"] = weight(2, 160)
        for expert in range(2):
            tensors |= {f"{at}.mlp.experts.{expert}.{name}.weight": weight(*shape) for name, shape in MLP.items()}
        if family == "deepseek_v32":
            tensors |= {f"{at}.self_attn.{name}.weight": weight(*shape) for name, shape in PLAIN_MLA.items()}
            tensors[f"{at}.self_attn.indexer.k_norm.bias"] = weight(64)
            tensors[f"{at}.mlp.gate.e_score_correction_bias"] = weight(2).float()
            tensors |= {f"{at}.mlp.shared_experts.{name}.weight": weight(*shape) for name, shape in MLP.items()}
    if family == "deepseek_v32":  # the last layer is the MTP layer
        last = f"model.layers.{layers - 1}"
        tensors |= {f"{last}.{norm}.weight": weight(160) for norm in ("enorm", "hnorm", "shared_head.norm")}
        tensors |= {f"{last}.eh_proj.weight": weight(160, 320), f"{last}.shared_head.head.weight": weight(256, 160)}
        tensors[f"{last}.embed_tokens.weight"] = weight(256, 160)
    return tensors


def write_folder(folder: Path, tensors: dict[str, Tensor], shards: int = 3, config: dict | None = None) -> Path:
    """A model folder; tensors are distributed over the shards in order."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "dtype": "bfloat16"} | (config or {})))
    (folder / "tokenizer.json").write_text("{}")
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, after checking its index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    assert {path.name for path in folder.glob("*.safetensors")} == set(files)
    tensors = {name: tensor for file in files.values() for name, tensor in file.items()}
    assert index["weight_map"].keys() == tensors.keys()
    assert all(name in files[file] for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    return tensors


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equality of dtype, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and bytes(_flat(a)) == bytes(_flat(b))


def _flat(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
