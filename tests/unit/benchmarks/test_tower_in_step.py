"""What train_mfu.py measures of a vision tower: samples that the trainer takes, and a clock of both directions."""

from __future__ import annotations

import pytest
import torch
from transformers.utils import ModelOutput

from benchmarks.published_configs import WITHOUT_A_FILE
from benchmarks.tower_in_step import SampleImages, TowerClock
from slime.backends.megatron_utils.flags.model_dims import tower_dims
from slime.backends.megatron_utils.layers.vision import place_images

CONFIG = WITHOUT_A_FILE["qwen3-vl-8B"]


def images_of(count: int, height: int, width: int) -> SampleImages:
    return SampleImages.of(tower_dims(CONFIG["vision_config"]), CONFIG, count, (height, width))


def test_a_sample_has_its_images_in_front_of_its_text_and_their_pixels_in_bytes():
    images = images_of(2, 64, 128)
    assert images.num_tokens == 2 * (2 * 4 + 1)
    tokens = images.replace_start(torch.arange(1, 31))
    inputs = images.train_inputs(torch.Generator().manual_seed(0))
    rows, _ = place_images(
        tokens, inputs["image_grid_thw"], image_token=CONFIG["image_token_id"], merge=images.tower.merge
    )
    assert rows.tolist() == [*range(8), -1, *range(8, 16), *[-1] * 13]
    assert tokens[18:].tolist() == list(range(19, 31))
    assert inputs["pixel_values"].shape == (64, 1536) and inputs["pixel_values"].dtype == torch.uint8


def test_the_tower_of_a_megapixel_image_takes_the_operations_counted_by_hand():
    block = 4 * 1152 * 1152 + 2 * 1152 * 4304
    merger = 4608 * 4608 + 4608 * 4096
    by_hand = 4096 * (2 * 1536 * 1152 + 27 * (2 * block + 4 * 4096 * 1152)) + 4 * 1024 * 2 * merger
    assert images_of(3, 1024, 1024).forward_flops == 3 * by_hand


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, pixels: torch.Tensor) -> ModelOutput:
        return ModelOutput(pooler_output=self.last(self.first(pixels)))


@pytest.mark.parametrize("is_trained", [True, False])
def test_the_clock_takes_both_directions_of_a_tower_that_is_trained(is_trained: bool):
    tower = Tower().requires_grad_(is_trained)
    clock = TowerClock(tower)
    scale = torch.ones(3, requires_grad=True)
    for _ in range(2):
        (tower(torch.randn(2, 3)).pooler_output * scale).sum().backward()
        seconds = clock.take()
        assert seconds["forward"] > 0 and (seconds["backward"] > 0) == is_trained
    assert clock.take() == {"forward": 0, "backward": 0}
