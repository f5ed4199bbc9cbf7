"""Folders and references of models with a vision tower, both transformers' own, and images for their prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from slime.weights.stacked_experts import by_expert
from tests.matrix.case import (
    ROUTER_BIAS,
    FamilyCase,
    Tensors,
    hide_broken_torchvision,
    quiet_transformers,
    random_tensor,
    read_tensors,
    write_tensors,
)

IMAGE, START, END = 128, 129, 130
GRIDS = {
    # sample -> patches of its images in time, height and width
    0: [(1, 2, 6)],
    2: [(1, 2, 2)] * 4 + [(1, 2, 4), (1, 4, 2)] * 4,
    4: [(1, 6, 10), (1, 2, 14)],
    5: [(1, 2, 2)],
    6: [(1, 10, 2), (1, 6, 6)],
}
"""Odd numbers of tokens, images one token high, twelve images in a prompt; other samples have none."""


def image_adder(vision: Mapping[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Return a function that puts images before prompts, split for this ``vision_config``; the text may hold tokens
    that look like images after them.
    """
    merge, values = vision["spatial_merge_size"], 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2

    def add_images(data: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(7)
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

    return add_images


def vision_writer(
    vision: Mapping[str, Any], change: Callable[[Tensors], None] = lambda tensors: None
) -> Callable[[FamilyCase, Path, int], None]:
    """Return a writer of a random model with this ``vision_config``; ``change`` modifies the folder's tensors in
    place."""

    def write(case: FamilyCase, folder: Path, seed: int) -> None:
        hide_broken_torchvision()
        import transformers

        config = transformers.AutoConfig.for_model(
            case.config["model_type"],
            text_config={key: value for key, value in case.config.items() if key != "model_type"},
            vision_config=dict(vision),
            image_token_id=IMAGE,
            vision_start_token_id=START,
            vision_end_token_id=END,
            tie_word_embeddings=case.config["tie_word_embeddings"],
        )
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        state = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n.endswith(ROUTER_BIAS))]
        with torch.no_grad(), quiet_transformers():
            for name, tensor in state:
                tensor.copy_(random_tensor(name, tensor.shape, generator))
            model.save_pretrained(folder)
        tensors = read_tensors(folder)
        change(tensors)
        write_tensors(folder, tensors)

    return write


def transpose_stacks(tensors: Tensors) -> None:
    """Stacked experts as in the published Qwen3-VL; transformers reads both forms and writes the other."""
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor.mT.contiguous()


def as_pushed(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """What a push sends of such a folder: expert by expert."""
    return dict(by_expert(tensors))


def reference(folder: Path) -> torch.nn.Module:
    """The transformers model in fp32."""
    hide_broken_torchvision()
    import transformers

    with quiet_transformers():
        return transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
