"""Graders that wait: for the trainer, so that an evaluation lasts until the third rollout is saved, or for a test."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 600.0


async def reward(args: Any, sample: Any, **_: Any) -> float:
    """1.0 when the checkpoint of rollout 2 exists; 0.0 if it does not appear in time."""
    tracker = Path(args.save, "latest_checkpointed_iteration.txt")
    return float(await _comes(lambda: tracker.exists() and tracker.read_text() == "2"))


async def random_when_asked_to_go_on(args: Any, sample: Any, **_: Any) -> float:
    """0.0 or 1.0, once the test has put ``go`` into the run's folder."""
    assert await _comes(Path(args.save, "go").exists)
    return float(random.randint(0, 1))


async def _comes(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.2)
    return True
