"""Errors of the ranks' results against the reference, as numbers for the tests and for the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.oracle.reference import Example
from tests.oracle.step import advantages_and_returns, expected_steps
from tests.oracle.variants import ROLLOUTS_PER_STEP, arguments, problem

FLOOR = 0.05
"""Errors are relative to the largest number of the kind, or to this if all are smaller."""
BOUNDS = {"advantages": 2e-6, "metrics": 1e-5, "gradient": 5e-6}
"""float32 against float64."""


@dataclass(frozen=True, slots=True)
class Errors:
    """The worst relative error of each kind."""

    advantages: float = 0.0
    metrics: float = 0.0
    """Metrics, including the loss."""
    gradient: float = 0.0
    worst_metric: str = ""

    def within_bounds(self) -> bool:
        """Whether all are below ``BOUNDS``; a NaN is not."""
        return all(getattr(self, kind) <= bound for kind, bound in BOUNDS.items())

    def worst(self) -> float:
        """The worst of the three, in units of its bound."""
        return max(getattr(self, kind) / bound for kind, bound in BOUNDS.items())


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest number; infinite if shapes differ or a number is not finite."""
    if found.shape != wanted.shape or not bool(torch.isfinite(found).all()):
        return math.inf
    if not wanted.numel():
        return 0.0
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=FLOOR))


@cache
def _reference(variant: str, seed: int) -> tuple[list[Example], list[Tensor], list[tuple[dict[str, float], Tensor]]]:
    """Batch, advantages and steps: the same for every layout."""
    args = arguments(variant)
    examples, table = problem(args, seed)
    advantages, _ = advantages_and_returns(args, examples)
    return examples, advantages, expected_steps(args, examples, table, ROLLOUTS_PER_STEP)


def errors_of_cell(variant: str, seed: int, ranks: Sequence[dict[str, Any]]) -> Errors:
    """Compare the results of ``trainer.steps_of_this_rank`` of all ranks with the reference."""
    examples, wanted_advantages, expected = _reference(variant, seed)
    finished = [rank for rank in ranks if rank["steps"]]
    assert finished and all(len(rank["steps"]) == len(expected) == 2 for rank in finished)

    found_advantages = {k: row for rank in finished for k, row in rank["advantages"].items()}
    rollout_ids = list(dict.fromkeys(example.rollout_id for example in examples))
    trained = set(rollout_ids[: len(rollout_ids) // ROLLOUTS_PER_STEP * ROLLOUTS_PER_STEP])
    in_schedule = [k for k, example in enumerate(examples) if example.rollout_id in trained]
    assert sorted(found_advantages) == in_schedule, "samples of whole steps, each on some rank"
    advantage_error = relative_error(
        torch.tensor([x for k in in_schedule for x in found_advantages[k]], dtype=torch.float64),
        torch.cat([wanted_advantages[k] for k in in_schedule]),
    )

    metric_error, worst_metric, gradient_error = 0.0, "", 0.0
    for step, (metrics, gradient) in enumerate(expected):
        for rank in finished:
            found = rank["steps"][step]["metrics"]
            if found.keys() != metrics.keys():
                return Errors(advantage_error, math.inf, math.inf, ",".join(sorted(found.keys() ^ metrics.keys())))
            for name, value in metrics.items():
                error = relative_error(torch.tensor([found[name]]).double(), torch.tensor([value]).double())
                if error > metric_error:
                    metric_error, worst_metric = error, name
        shards = {tuple(rank["shard"]): torch.tensor(rank["steps"][step]["grad"]).double() for rank in finished}
        whole = torch.cat([shards[key] for key in sorted(shards)], dim=1)
        gradient_error = max(gradient_error, relative_error(whole, gradient))
    return Errors(advantage_error, metric_error, gradient_error, worst_metric)
