"""The trainer's gradient against finite differences of its own loss: float64, from the loss to the logits.

Central differences along random directions.  A loss may hold parts of itself constant (``detach``: CISPO's
weight, an old log-prob that equals the current one); its derivative is then that of the loss with these parts frozen.
So every ``detach`` is recorded when the gradient is taken, and returns the same values when the loss is measured.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.matrix.pool import RankPool
from tests.oracle.trainer import guides_of, losses_of_a_step, rollout_of_this_rank
from tests.oracle.variants import PACKING_OF, VARIANTS, arguments, problem

BOUND = 1e-8
"""Relative to the largest derivative along any of the directions."""
STEP = 1e-5
NUM_DIRECTIONS = 6
SEED = 3
IN_FLOAT32 = ("critic", "critic_per_token", "custom_loss")
"""Cases in which the trainer converts to float32: the critic's values and a custom loss's logits."""
DIFFERENTIABLE = tuple(variant for variant in VARIANTS if variant not in IN_FLOAT32)


class FrozenConstants(TorchFunctionMode):
    """Records the result of every ``detach``, or, given a record, returns it."""

    def __init__(self, record: list[Tensor] | None = None) -> None:
        super().__init__()
        self.record: list[Tensor] = [] if record is None else record
        self._replays = record is not None
        self._next = 0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is not Tensor.detach:
            return result
        if not self._replays:
            self.record.append(result.clone())
            return result
        self._next += 1
        assert self.record[self._next - 1].shape == result.shape, "the loss took another way"
        return self.record[self._next - 1]


def difference_of(variant: str) -> float:
    """The worst error of one variant; in a process that has parallel state."""
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns

    args = arguments(variant)
    examples, table = problem(args, SEED)
    data, schedule = rollout_of_this_rank(args, examples, PACKING_OF[variant])
    compute_advantages_and_returns(args, data, guides_of(args))
    if args.reuse_log_probs:
        del data["log_probs"]
    generator = torch.Generator().manual_seed(SEED)
    directions = torch.randn(NUM_DIRECTIONS, *table.shape, generator=generator, dtype=torch.float64)
    directions /= directions.flatten(1).norm(dim=1)[:, None, None]
    errors, largest = [], 1e-3
    first = 0
    for num_microbatches, step_size in zip(schedule.num_microbatches, schedule.global_batch_sizes, strict=True):
        loss_at = partial(_loss_of_step, args, data, first, num_microbatches, step_size)
        parameters = table.clone().requires_grad_()
        with FrozenConstants() as constants:
            loss = loss_at(parameters)
        assert loss.dtype == torch.float64, loss.dtype
        (gradient,) = torch.autograd.grad(loss, parameters)
        for direction in directions:
            ahead, behind = (_measured(loss_at, table + sign * STEP * direction, constants.record) for sign in (1, -1))
            slope = (ahead - behind) / (2 * STEP)
            errors.append(abs(slope - float((gradient * direction).sum())))
            largest = max(largest, abs(slope))
        first += num_microbatches
    return max(errors) / largest


def _loss_of_step(
    args: Namespace, data: dict[str, Any], first: int, num_microbatches: int, step_size: int, logits: Tensor
) -> Tensor:
    from slime.backends.megatron_utils.data import DataIterator

    iterator = DataIterator(data, data["micro_batch_indices"])
    iterator.offset = first
    losses = losses_of_a_step(args, iterator, logits, num_microbatches, step_size)
    return torch.stack([loss for loss, _, _ in losses]).sum()


def _measured(loss_at: Callable[[Tensor], Tensor], logits: Tensor, record: list[Tensor]) -> float:
    # With a gradient requested as before, so that the loss takes the same path.
    with FrozenConstants(record):
        return float(loss_at(logits.requires_grad_()))


def _differences_of_this_rank(variants: Sequence[str]) -> dict[str, float]:
    from slime.backends.megatron_utils import cpu_platform  # noqa: F401

    # isort: split
    from megatron.core import mpu

    mpu.initialize_model_parallel()
    return {variant: difference_of(variant) for variant in variants}


def differences_of(pool: RankPool, variants: Sequence[str]) -> dict[str, float]:
    """The worst error of each variant, computed in one process of the pool."""
    [found] = pool.run(_differences_of_this_rank, 1, list(variants), timeout_s=1800)
    return found
