"""Qwen3-VL, dense: images of many sizes in the prompts; a tower whose features three layers take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.matrix.case import FamilyCase, hide_broken_torchvision, quiet_transformers, random_tensor
from tests.matrix.families import qwen3
from tests.matrix.flags import model_flags

IMAGE, START, END = 128, 129, 130
VISION = {
    **{"depth": 4, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "in_channels": 3, "patch_size": 3},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 25, "out_hidden_size": 48},
    "deepstack_visual_indexes": [1, 2],
}
GRIDS = {
    # sample -> patches of its images in time, height and width
    0: [(1, 2, 6)],
    2: [(1, 2, 2)] * 4 + [(1, 2, 4), (1, 4, 2)] * 4,
    4: [(1, 6, 10), (1, 2, 14)],
    5: [(1, 2, 2)],
    6: [(1, 10, 2), (1, 6, 6)],
}
"""Odd numbers of tokens, images one token high, twelve images in a prompt; other samples have none."""


def add_images(data: dict[str, Any]) -> None:
    """Images in front of prompts; the text may hold tokens that look like images behind them."""
    generator = torch.Generator().manual_seed(7)
    merge, values = VISION["spatial_merge_size"], 3 * 2 * VISION["patch_size"] ** 2
    data["multimodal_train_inputs"] = [None] * len(data["tokens"])
    for index, tokens in enumerate(data["tokens"]):
        tokens[:] = [token if token < IMAGE else token - 5 for token in tokens]
        prompt: list[int] = []
        grids = GRIDS.get(index, [])
        for time, height, width in grids:
            prompt += [START, *[IMAGE] * (time * height * width // merge**2), END, 1 + index]
        tokens[:0] = prompt
        if grids:
            patches = sum(time * height * width for time, height, width in grids)
            data["multimodal_train_inputs"][index] = {
                "pixel_values": torch.randn(patches, values, generator=generator),
                "image_grid_thw": torch.tensor(grids),
            }


def write(case: FamilyCase, folder: Path, seed: int) -> None:
    """A random model, saved by transformers."""
    hide_broken_torchvision()
    import transformers

    text = {key: value for key, value in case.config.items() if key != "model_type"}
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=VISION,
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=case.config["tie_word_embeddings"],
    )
    model = transformers.Qwen3VLForConditionalGeneration(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), quiet_transformers():
        for name, tensor in model.named_parameters():
            tensor.copy_(random_tensor(name, tensor.shape, generator))
        model.save_pretrained(folder)


def reference(folder: Path) -> torch.nn.Module:
    """The transformers model in fp32."""
    hide_broken_torchvision()
    import transformers

    with quiet_transformers():
        return transformers.Qwen3VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )


CASE = FamilyCase(
    name="qwen3_vl",
    config={
        **{key: value for key, value in qwen3.CASE.config.items() if key != "rope_theta"},
        "model_type": "qwen3_vl",
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000.0},
            **{"mrope_section": [3, 3, 2], "mrope_interleaved": True},
        },
    },
    flags=lambda folder: model_flags(folder, "--train-vision-tower"),
    write=write,
    reference=reference,
    add_images=add_images,
    about="18 images in 9 prompts, 1 to 15 tokens each; features of the tower in 2 layers; the tower trained",
)
