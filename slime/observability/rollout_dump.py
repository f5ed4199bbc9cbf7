"""Rollouts on disk, for debugging: ``--save-debug-rollout-data`` writes, ``--load-debug-rollout-data`` replays.

A dump is one ``torch.save`` file ``{"rollout_id": int | str, "samples": [Sample.to_dict(), ...]}``.  The path is a
template: ``{rollout_id}`` becomes the number (``eval_N`` for an evaluation); without it each rollout overwrites the
last.  A dump that cannot be written (a full disk) leaves no half file behind.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from slime.utils.atomic_file import write_atomically
from slime.utils.errors import DataError
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

SAVE_FLAG = "--save-debug-rollout-data"


def dump_rollout(args: Namespace, rollout_id: int, samples: Sequence[Sample], *, evaluation: bool = False) -> None:
    """Write the dump that the flags ask for, if any.

    Training does not depend on it: a run goes on without a dump that cannot be written, and says so.  With
    ``--debug-rollout-only`` the dump is what the run is for, and the error ends it.

    Raises:
        DataError: the dump cannot be written, with ``--debug-rollout-only``.
    """
    if not args.save_debug_rollout_data:
        return
    try:
        save_rollout_dump(args.save_debug_rollout_data, rollout_id, samples, evaluation=evaluation)
    except DataError as error:
        if args.debug_rollout_only:
            raise
        logger.error("%s The run goes on without this dump.", error)


def save_rollout_dump(template: str, rollout_id: int, samples: Sequence[Sample], *, evaluation: bool = False) -> Path:
    """Write the samples of one rollout; gives the path written.

    Raises:
        DataError: it cannot be written; a dump that was there before still is.
    """
    name = f"eval_{rollout_id}" if evaluation else rollout_id
    path = Path(template.format(rollout_id=name))
    content = {"rollout_id": name, "samples": [sample.to_dict() for sample in samples]}
    write_atomically(
        path, lambda file: torch.save(content, file), what=f"The dump of rollout {name}", flag=SAVE_FLAG, to_disk=False
    )
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
