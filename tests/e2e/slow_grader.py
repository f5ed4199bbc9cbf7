"""A grader that takes its time: an evaluation with it lasts longer than a training step."""

from __future__ import annotations

import asyncio
from typing import Any

GRADING_S = 25.0


async def reward(args: Any, sample: Any, **_: Any) -> float:
    """1.0, late."""
    await asyncio.sleep(GRADING_S)
    return 1.0
