"""Rollouts on disk, for debugging: ``--save-debug-rollout-data`` writes, ``--load-debug-rollout-data`` replays.

A dump is one ``torch.save`` file ``{"rollout_id": int | str, "samples": [Sample.to_dict(), ...]}``.  The path is a
template: ``{rollout_id}`` becomes the number (``eval_N`` for an evaluation); without it each rollout overwrites the
last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from slime.utils.errors import DataError
from slime.utils.types import Sample


def save_rollout_dump(template: str, rollout_id: int, samples: Sequence[Sample], *, evaluation: bool = False) -> Path:
    """Write the samples of one rollout; gives the path written."""
    name = f"eval_{rollout_id}" if evaluation else rollout_id
    path = Path(template.format(rollout_id=name))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": name, "samples": [sample.to_dict() for sample in samples]}, path)
    return path


def load_rollout_dump(
    template: str, rollout_id: int, *, subsample: float | None = None, flag: str = "--load-debug-rollout-data"
) -> list[Sample]:
    """Read the samples of one rollout.

    Args:
        template: the path template it was written with.
        rollout_id: which rollout.
        subsample: keep this fraction, half of it from the front and half from the back; None keeps all.
        flag: what the user gave the template with.

    Raises:
        DataError: the file is missing or holds no samples.
    """
    path = Path(template.format(rollout_id=rollout_id))
    if not path.exists():
        raise DataError(
            f"{flag}: {path} does not exist. It must be a file written by "
            "--save-debug-rollout-data, with {rollout_id} in the path when there is one file a rollout."
        )
    content = torch.load(path, weights_only=False)
    samples = [Sample.from_dict(row) for row in content["samples"]]
    if subsample is not None:
        half = int(len(samples) * subsample) // 2
        samples = samples[:half] + samples[len(samples) - half :]
    if not samples:
        raise DataError(f"{flag}: {path} holds no samples (subsample {subsample})")
    return samples
