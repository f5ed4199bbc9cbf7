"""A Qwen3-VL of 600 thousand random parameters with its processor, as an HF checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from examples.vision_shapes.model import START_ID, write_model


def save_tiny_model(folder: Path, seed: int) -> Any:
    """Write the checkpoint to ``folder`` and return the model.  Greedily, it generates no image token."""
    from transformers import AutoModelForImageTextToText

    write_model(folder, seed)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        model.lm_head.weight[START_ID:] = 0.0
    model.save_pretrained(folder)
    return model
