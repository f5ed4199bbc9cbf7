"""A tool of the policy, and an environment of text, for the stock function of conversations.

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
    """``--custom-rm-path``: 1 when the last box has the label."""
    return float(extract_boxed_answer(sample.response) == str(sample.label))


class GuessNumber:
    """A number from 1 to ``highest`` of the row's metadata (100) is to be found; the reward is less for each guess."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Choose the number."""
        highest = (options or {}).get("highest", 100)
        self.number = random.Random(seed).randint(1, highest)
        self.guesses = 0
        return f"Guess my number, from 1 to {highest}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Compare a guess with it."""
        self.guesses += 1
        said = re.findall(r"\d+", action)
        guess = int(said[-1]) if said else 0
        if guess == self.number:
            return "", 1 / self.guesses, True, False, {}
        return ("higher" if guess < self.number else "lower"), 0.0, False, False, {}
