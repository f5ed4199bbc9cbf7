"""An environment of examples/geo3k_vlm_multi_turn that answers every turn with an image of another size."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from PIL import Image

from examples.geo3k_vlm_multi_turn.base_env import BaseInteractionEnv
from slime.utils.types import Sample


class ShowingEnv(BaseInteractionEnv):
    """Shows an image after each turn except the last."""

    def __init__(self, turns: int) -> None:
        self.left = turns

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        self.left -= 1
        shown = Image.new("RGB", (32 + 16 * self.left, 48), (90 * self.left % 256, 200, 40))
        return {"obs_str": "look", "role": "tool", "images": [shown]}, self.left <= 0, {}


def build_env(sample: Sample, args: Namespace) -> ShowingEnv:
    return ShowingEnv(args.max_turns)
