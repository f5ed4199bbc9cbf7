"""Folders of a language model with a vision tower that the trainer ignores, both transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.matrix.case import FamilyCase, Tensors, hide_broken_torchvision, quiet_transformers, random_tensor


def writer(text_type: str, vision: Mapping[str, Any]) -> Callable[[FamilyCase, Path, int], None]:
    """Return a writer of a random folder whose ``text_config`` is the case's config under the type ``text_type``."""

    def write(case: FamilyCase, folder: Path, seed: int) -> None:
        hide_broken_torchvision()
        from transformers import AutoConfig, AutoModelForImageTextToText

        text = {**case.config, "model_type": text_type}
        tied = bool(case.config["tie_word_embeddings"])
        config = AutoConfig.for_model(
            case.config["model_type"], text_config=text, vision_config=dict(vision), tie_word_embeddings=tied
        )
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(random_tensor(name, parameter.shape, generator))
        with quiet_transformers():
            model.save_pretrained(folder)

    return write


def reference(folder: Path) -> torch.nn.Module:
    """Return the whole model in fp32, which accepts text alone."""
    hide_broken_torchvision()
    from transformers import AutoModelForImageTextToText

    with quiet_transformers():
        return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def as_pushed(tensors: Mapping[str, Tensor]) -> Tensors:
    """The language model's tensors."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith("language_model.")}
