"""The images of a plan's samples: their patches, their tokens in the prompts, and those of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slime.planning.layout import ParallelSizes
from slime.planning.plan import PlanOptions
from slime.planning.traffic import StepWork
from slime.train_data.model_dims import ModelDims
from slime.utils.errors import ConfigError


def image_patches(dims: ModelDims, options: PlanOptions) -> list[int]:
    """Return the patches of each image of a sample.

    Raises:
        ConfigError: there are images, and the trainer's model has no vision tower.
    """
    if not options.images:
        return []
    if dims.tower is None:
        raise ConfigError("--image is given, but the trainer has no vision tower for this model; drop it.")
    return [dims.tower.patches_of(*size) for size in options.images]


def with_image_tokens(dims: ModelDims, options: PlanOptions, images: Sequence[int]) -> PlanOptions:
    """Return the options with the images' tokens in the prompts."""
    if dims.tower is None or not images:
        return options
    tokens = sum(images) // dims.tower.merge**2
    return replace(options, prompts=tuple(prompt + tokens for prompt in options.prompts or (0,)))


def patches_of_rank(tokens: int, per_sample: int, sizes: ParallelSizes, work: StepWork | None) -> int:
    """Return the patches in a micro-batch of so many tokens on a rank: samples of the mean length fill it."""
    if work is None:
        return 0
    patches = -(-tokens * per_sample * work.num_samples // work.num_tokens)
    return -(-patches // (sizes.tensor if sizes.sequence_parallel else 1))
