"""Replaces generation with recorded samples while the engines run; everything else in the job is real.

    --rollout-function-path slime.rollout.forge_load.generate_rollout
    --load-forge-rollout-data DIR/{rollout_id}.pt

The files are written by ``--save-debug-rollout-data``.  A rollout without its own file uses the file of rollout 0, so
one file is enough to test memory, weight pushes and speed over any number of rollouts.  ``--load-debug-rollout-data``
replays the same files without engines.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.flags.reward import RewardConfig
from slime.observability.dumps import load_rollout_dump
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.eval_data import results_of
from slime.utils.errors import ConfigError
from slime.utils.types import Sample

__all__ = ["generate_rollout"]

logger = logging.getLogger(__name__)

FLAG = "--load-forge-rollout-data"
EVAL_NAME = "forge_eval"


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return the recorded samples of a rollout, grouped by prompt, or of an evaluation, as data set ``forge_eval``.

    Raises:
        ConfigError: the flag is not given, or an evaluation reward has no entry ``--eval-reward-key``.
        DataError: neither this rollout's file nor the file of rollout 0 exists.
    """
    template = args.load_forge_rollout_data
    if not template:
        raise ConfigError(f"{FLAG} is not given; it must name a file that --save-debug-rollout-data wrote.")
    if evaluation:
        path = _first_that_exists(template, f"eval_{rollout_id}", "eval_0", rollout_id, 0)
        samples = load_rollout_dump(path, rollout_id, flag=FLAG, is_trusted=args.trust_debug_data)
        return RolloutFnEvalOutput(data={EVAL_NAME: results_of(samples, RewardConfig.of(args).eval_key, EVAL_NAME)})
    path = _first_that_exists(template, rollout_id, 0)
    samples = load_rollout_dump(path, rollout_id, flag=FLAG, is_trusted=args.trust_debug_data)
    logger.info("Rollout %d: %d samples from %s", rollout_id, len(samples), path)
    return RolloutFnTrainOutput(samples=in_groups(samples))


def in_groups(samples: list[Sample]) -> list[list[Sample]]:
    """Group adjacent samples with the same ``group_index``; a sample without one forms its own group."""
    groups: list[list[Sample]] = []
    for sample in samples:
        if groups and sample.group_index is not None and groups[-1][0].group_index == sample.group_index:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def _first_that_exists(template: str, *names: int | str) -> str:
    paths = [template.format(rollout_id=name) for name in names]
    return next((path for path in paths if Path(path).exists()), paths[0])
