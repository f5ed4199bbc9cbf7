"""A grader that waits for the trainer: an evaluation with it lasts until the third rollout is saved."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

DEADLINE_S = 600.0


async def reward(args: Any, sample: Any, **_: Any) -> float:
    """1.0 when the checkpoint of rollout 2 is there; 0.0 when it does not come in time."""
    tracker = Path(args.save, "latest_checkpointed_iteration.txt")
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if tracker.exists() and tracker.read_text() == "2":
            return 1.0
        await asyncio.sleep(0.2)
    return 0.0
