"""Folders with a language model and a vision tower, like the published Qwen3.5: made from, and read as, text models.

The language model's tensors have the prefix ``model.language_model.``, the tower's ``model.visual.``; the experts of a
layer are stacked in one tensor; config.json has the language model's settings in ``text_config``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.weights.stacked_experts import ExpertStacker, Stack, by_expert, place_of
from tests.matrix.case import FamilyCase, Tensors, random_tensor, read_config, read_tensors, write_tensors
from tests.matrix.references.mtp import ModelWithMtp, MtpFormat, write_with_mtp
from tests.matrix.references.vision import END, IMAGE, START

TRUNK, TEXT, TOWER = "model.language_model.", "model.", "model.visual."
VISION = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "in_channels": 3, "patch_size": 4},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16},
    "deepstack_visual_indexes": [],
}


def to_text(tensors: Mapping[str, Tensor]) -> Tensors:
    """The language model, expert by expert, under the names of a folder without a tower."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(TOWER)}
    return {name.replace(TRUNK, TEXT, 1): tensor.clone() for name, tensor in by_expert(kept)}


def to_composite(tensors: Mapping[str, Tensor]) -> Tensors:
    """The names of a composite folder, experts one by one."""
    return {
        TRUNK + name.removeprefix(TEXT) if name.startswith(TEXT) else name: tensor for name, tensor in tensors.items()
    }


def as_pushed(tensors: Mapping[str, Tensor]) -> Tensors:
    """What a push sends of a composite folder: without the tower, expert by expert."""
    return to_composite(to_text(tensors))


def write_composite(
    case: FamilyCase, folder: Path, seed: int, mtp: MtpFormat, change: Callable[[Tensors], None]
) -> None:
    """A random composite folder with MTP layers.

    Args:
        case: ``model_type`` is the folder's; the rest goes into ``text_config``.
        folder: the folder to write.
        seed: seed of the numbers.
        mtp: names of the MTP layers.
        change: modifies the text model's tensors in place.
    """
    kind = case.config["model_type"]
    text_case = replace(case, config={**case.config, "model_type": f"{kind}_text"})
    write_with_mtp(text_case, folder, seed, mtp)
    tensors = dict(by_expert(read_tensors(folder)))
    change(tensors)
    text = read_config(folder) | {
        "mtp_num_hidden_layers": case.config["num_nextn_predict_layers"],
        "full_attention_interval": case.config["full_attention_interval"],
    }
    for key in ("architectures", "num_nextn_predict_layers", "transformers_version"):
        text.pop(key, None)
    dtype = text.pop("dtype", "float32")
    vision = {**VISION, "model_type": kind, "out_hidden_size": case.config["hidden_size"]}
    config = {
        "architectures": [case.architecture],
        "model_type": kind,
        **{"text_config": text, "vision_config": vision, "dtype": dtype},
        **{"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END},
        "tie_word_embeddings": case.config["tie_word_embeddings"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    stacks = {place.stack: Stack(case.config["num_experts"]) for place in map(place_of, tensors) if place}
    stacked = dict(ExpertStacker(stacks).stack(tensors.items()))
    write_tensors(folder, {**to_composite(stacked), **_tower(kind, vision, seed)})


def _tower(kind: str, vision: Mapping[str, Any], seed: int) -> Tensors:
    from transformers import AutoConfig, AutoModel

    settings = {key: value for key, value in vision.items() if key not in ("model_type", "deepstack_visual_indexes")}
    model = AutoModel.from_config(AutoConfig.for_model(f"{kind}_vision", **settings))
    generator = torch.Generator().manual_seed(seed + 2)
    return {
        TOWER + name: random_tensor(name, parameter.shape, generator) for name, parameter in model.named_parameters()
    }


class CompositeModel(ModelWithMtp):
    """The language model of a composite folder, its parameters named as a push names them."""

    def __init__(self, folder: Path, mtp: MtpFormat) -> None:
        """From a folder of :func:`write_composite`, in fp32."""
        config = read_config(folder)["text_config"]
        config["num_nextn_predict_layers"] = config.pop("mtp_num_hidden_layers")
        config["layer_types"] += ["full_attention"] * config["num_nextn_predict_layers"]  # inside the MTP layers
        with tempfile.TemporaryDirectory() as text:
            (Path(text) / "config.json").write_text(json.dumps(config))
            write_tensors(Path(text), to_text(read_tensors(folder)))
            super().__init__(Path(text), mtp)

    def save_pretrained(self, folder: str) -> None:
        """All parameters under the names of a composite folder."""
        super().save_pretrained(folder)
        write_tensors(Path(folder), to_composite(read_tensors(Path(folder))))
