"""The vision tower in train_mfu.py's step: images for the samples, the tower's time, and waits of the host."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from slime.train_data.model_dims import TowerDims


@dataclass(frozen=True, kw_only=True)
class SampleImages:
    """Images of one size before the text of each sample."""

    num_images: int
    height: int
    """Patches, as ``width``."""
    width: int
    tower: TowerDims
    image_token: int

    @classmethod
    def of(cls, tower: TowerDims, config: Mapping[str, Any], num_images: int, pixels: tuple[int, int]) -> SampleImages:
        """Return images with this many pixels (height, width), with sides rounded to multiples of a token's."""
        height, width = (max(1, round(side / tower.patch_side / tower.merge)) * tower.merge for side in pixels)
        return cls(
            num_images=num_images, height=height, width=width, tower=tower, image_token=config["image_token_id"]
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of a sample's images, each image followed by a text token."""
        return self.num_images * (self.height * self.width // self.tower.merge**2 + 1)

    @property
    def forward_flops(self) -> int:
        """FLOPs of the tower's forward pass over a sample's images."""
        return self.num_images * self.tower.forward_flops(self.height * self.width)

    def replace_start(self, tokens: Tensor) -> Tensor:
        """Return [L] ids whose first ones are replaced by the images' tokens."""
        images = torch.full((self.num_images, self.num_tokens // max(1, self.num_images)), self.image_token)
        images[:, -1:] = 0
        return torch.cat([images.flatten(), tokens[self.num_tokens :]])

    def train_inputs(self, generator: torch.Generator) -> dict[str, Tensor] | None:
        """Return what rollouts pass to the trainer for a sample: random pixels, in bytes; None without images."""
        if not self.num_images:
            return None
        shape = (self.num_images * self.height * self.width, self.tower.patch_size)
        return {
            "pixel_values": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
            "pixel_range": torch.tensor([127.5, 127.5]),
            "image_grid_thw": torch.tensor([[1, self.height, self.width]] * self.num_images),
        }


class TowerClock:
    """Seconds of a tower's forward and backward passes: the GPU's own if there is one, else the host's."""

    def __init__(self, tower: torch.nn.Module) -> None:
        self._marks: dict[str, list[Any]] = {"forward": [], "backward": []}
        tower.register_forward_pre_hook(lambda *_: self._mark("forward"))
        tower.register_forward_hook(self._after_forward)
        if trained := [parameter for parameter in tower.parameters() if parameter.requires_grad]:
            register_multi_grad_hook(trained, lambda _: self._mark("backward"))

    def _after_forward(self, tower: torch.nn.Module, args: Any, output: Any) -> None:
        self._mark("forward")
        features = [output.pooler_output, *(output.get("deepstack_features") or ())]
        if all(feature.requires_grad for feature in features):
            # The features' gradients come before the parameters', which mark the end of the pass.
            register_multi_grad_hook(features, lambda _: self._mark("backward"), mode="any")

    def _mark(self, name: str) -> None:
        if not torch.cuda.is_available():
            self._marks[name].append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks[name].append(event)

    def take(self) -> dict[str, float]:
        """Return the seconds of each pass since the last call; the GPU must have finished them."""
        seconds = {}
        for name, marks in self._marks.items():
            pairs: Sequence[tuple[Any, Any]] = list(zip(marks[::2], marks[1::2], strict=True))
            seconds[name] = sum(
                begin.elapsed_time(end) / 1e3 if torch.cuda.is_available() else end - begin for begin, end in pairs
            )
            marks.clear()
        return seconds


@dataclass
class HostWaits:
    """Counts how often the host waited for the GPU; None without a GPU."""

    places: Counter[str] | None = field(default_factory=lambda: Counter() if torch.cuda.is_available() else None)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the waits of the enclosed code; other warnings are lost meanwhile."""
        if self.places is None:
            yield
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
        self.places.update(f"{'/'.join(Path(wait.filename).parts[-3:])}:{wait.lineno}" for wait in waits)
