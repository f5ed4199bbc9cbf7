"""A tool and a text environment for the built-in conversation function.

    --rollout-tools examples.multi_turn.multiply --custom-rm-path examples.multi_turn.reward
    --rollout-environment examples.multi_turn.GuessNumber

examples/run-tiny-turns.sh and run-tiny-environment.sh train with them on two cores.
"""

from __future__ import annotations

import random
import re
from argparse import Namespace
from typing import Any

from slime.rollout.rm_hub import extract_boxed_answer
from slime.utils.types import Sample


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: the first.
        b: the second.
    """
    return a * b


async def reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """``--custom-rm-path``: 1 if the last box holds the label, else 0."""
    return float(extract_boxed_answer(sample.response) == str(sample.label))


class GuessNumber:
    """Guess a number from 1 to ``highest`` (from the row's metadata, default 100); the reward is 1 / guesses."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Draw the number."""
        highest = (options or {}).get("highest", 100)
        self.number = random.Random(seed).randint(1, highest)
        self.guesses = 0
        return f"Guess my number, from 1 to {highest}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Compare a guess with the number."""
        self.guesses += 1
        said = re.findall(r"\d+", action)
        guess = int(said[-1]) if said else 0
        if guess == self.number:
            return "", 1 / self.guesses, True, False, {}
        return ("higher" if guess < self.number else "lower"), 0.0, False, False, {}
