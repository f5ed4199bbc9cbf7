"""Kimi-K2.5: Kimi-K2 in a folder with a vision tower; only the text model is trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.matrix.case import FamilyCase, random_tensor, read_config, read_tensors, write_tensors
from tests.matrix.families import kimi_k2
from tests.matrix.references.kimi_k2 import KimiK2
from tests.matrix.references.text_part import as_pushed

VISION = {
    **{"patch_size": 4, "hidden_size": 32, "vt_hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 1, "num_attention_heads": 2},
    **{"init_pos_emb_height": 4, "init_pos_emb_width": 4, "text_hidden_size": kimi_k2.CASE.config["hidden_size"]},
}
TOWER: dict[str, tuple[int, ...]] = {
    **{"vision_tower.patch_embed.proj.weight": (32, 3, 4, 4), "vision_tower.patch_embed.proj.bias": (32,)},
    "vision_tower.patch_embed.pos_emb.weight": (4, 4, 32),
    **{
        f"{module}.{kind}": (rows, columns) if kind == "weight" and columns else (rows,)
        for module, rows, columns in (
            *((f"vision_tower.encoder.blocks.0.{norm}", 32, 0) for norm in ("norm0", "norm1")),
            *(("vision_tower.encoder.blocks.0.wqkv", 96, 32), ("vision_tower.encoder.blocks.0.wo", 32, 32)),
            *(("vision_tower.encoder.blocks.0.mlp.fc0", 48, 32), ("vision_tower.encoder.blocks.0.mlp.fc1", 32, 48)),
            *(("vision_tower.encoder.final_layernorm", 32, 0), ("mm_projector.pre_norm", 32, 0)),
            *(("mm_projector.proj.0", 128, 128), ("mm_projector.proj.2", VISION["text_hidden_size"], 128)),
        )
        for kind in ("weight", "bias")
    },
}
"""Its tensors, under published names."""


class KimiK25(nn.Module):
    """Ids [1, L] to logits [1, L, vocab]; parameters are named as in the checkpoint."""

    def __init__(self, text: dict[str, object]) -> None:
        super().__init__()
        self.language_model = KimiK2(text)

    def forward(self, ids: Tensor) -> Tensor:
        return self.language_model(ids)


def write(case: FamilyCase, folder: Path, seed: int) -> None:
    """The text model of the case, and what a tower has."""
    folder.mkdir(parents=True, exist_ok=True)
    text = {**case.config, "model_type": "kimi_k2", "topk_method": "noaux_tc"}
    text["architectures"] = ["DeepseekV3ForCausalLM"]
    config = {"model_type": case.config["model_type"], "text_config": text, "vision_config": VISION}
    config |= {"architectures": [case.architecture], "dtype": "float32", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tensor.shape for name, tensor in KimiK25(text).state_dict().items()} | TOWER
    write_tensors(folder, {name: random_tensor(name, shape, generator) for name, shape in shapes.items()})


def load(folder: Path) -> KimiK25:
    """The text model of a folder."""
    model = KimiK25(read_config(folder)["text_config"])
    model.load_state_dict({name: t for name, t in read_tensors(folder).items() if name not in TOWER})
    return model


CASE = replace(
    kimi_k2.CASE,
    name="kimi_k25",
    architecture="KimiK25ForConditionalGeneration",
    config={**kimi_k2.CASE.config, "model_type": "kimi_k25"},
    write=write,
    reference=load,
    pushed=as_pushed,
    about="Kimi-K2's layers in a folder with a vision tower, which the trainer goes without",
)
