"""Copies a rank's own part of the training state to its host and back (``--trainer-recovery memory``).

    master weights, moments and step counters of its shards; untrained weights and buffers;
    parameter-group settings, position in the schedule, random generators

Unlike a checkpoint, which can be read in any parallel layout, a copy is restored to the same rank of the same layout.
Trained weights are rebuilt from the master weights of all ranks.  A frozen model below a transform's added parameters
is reloaded from its original source.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils.adam import parts_of
from slime.backends.megatron_utils.checkpoints.optimizer_state import (
    GROUP_NUMBERS,
    LiveStates,
    buckets,
    own_tensors,
)
from slime.backends.megatron_utils.checkpoints.resumed_state import (
    load_schedule,
    rng_state,
    schedule_state,
    set_generators,
)
from slime.backends.megatron_utils.model_transform import added_parameters
from slime.ext.recovery.state_copy import StateCopy
from slime.utils.errors import CheckpointError

logger = logging.getLogger(__name__)


def copy_state(
    rollout_id: int, model: list[torch.nn.Module], optimizer: Any, scheduler: Any, last: StateCopy | None = None
) -> StateCopy:
    """Copy this rank's state to the host; training may continue when this returns.

    Args:
        last: an earlier copy that is no longer needed; its memory is reused.
    """
    started = time.monotonic()
    untrained = _untrained(model, optimizer)
    tensors = {name: value for name, value in untrained.items() if isinstance(value, torch.Tensor)}
    values = {
        "others": {name: value for name, value in untrained.items() if name not in tensors},
        "optimizer": own_settings(optimizer),
        "opt_param_scheduler": schedule_state(scheduler),
        "rng_state": rng_state().data,
    }
    tensors |= own_tensors(optimizer)
    copy = StateCopy.take(rollout_id, tensors, values, room=last.data if last is not None else None)
    seconds = time.monotonic() - started
    logger.info("Copied %.3f GiB of state after rollout %d in %.2f s", copy.data.numel() / 2**30, rollout_id, seconds)
    return copy


@torch.no_grad()
def restore_state(copy: StateCopy, model: list[torch.nn.Module], optimizer: Any, scheduler: Any) -> int:
    """Restore a copy into freshly built parts and return its rollout.  Collective.

    Raises:
        CheckpointError: the copy is from another model or layout.
    """
    if (added := added_parameters(model)) is not None:
        added.load_frozen(model)
    saved, values = copy.read()
    live = own_tensors(optimizer)
    chunks = unwrap_model(model)
    untrained = {name: saved[name] for name in saved.keys() - live.keys()} | values["others"]
    wanted = {name: tensor.shape for name, tensor in live.items()}
    if untrained.keys() != _untrained(model, optimizer).keys() or any(
        name not in saved or saved[name].shape != shape for name, shape in wanted.items()
    ):
        raise CheckpointError(
            f"the copy of the state after rollout {copy.rollout_id} ({len(saved)} tensors) is from another model or "
            "layout"
        )
    for index, chunk in enumerate(chunks):
        prefix = f"{index}."
        own = {name.removeprefix(prefix): value for name, value in untrained.items() if name.startswith(prefix)}
        chunk.load_state_dict(own, strict=False)
    for name, tensor in live.items():
        tensor.copy_(saved[name])
    take_over_own(optimizer, values["optimizer"])
    wrapped: Any
    for wrapped in model:
        wrapped.start_param_sync(force_sync=True)
    load_schedule(values, scheduler)
    set_generators(values["rng_state"])
    logger.info("Resumed from the copy of the state after rollout %d", copy.rollout_id)
    return copy.rollout_id


def _untrained(model: list[torch.nn.Module], optimizer: Any) -> dict[str, Any]:
    """Return the chunks' state other than trained weights; nothing if a transform's added parameters are trained."""
    if added_parameters(model) is not None:
        return {}
    trained = trained_parameters(optimizer)
    held: dict[str, Any] = {}
    for index, chunk in enumerate(unwrap_model(model)):
        left_out = {name for name, p in chunk.named_parameters(remove_duplicate=False) if p in trained}
        held |= {f"{index}.{name}": value for name, value in chunk.state_dict().items() if name not in left_out}
    return held


def own_settings(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizer state that :func:`own_tensors` omits: parameter-group settings and the loss scaler."""
    return [
        (
            [
                {name: group[name] for name in GROUP_NUMBERS if name in group}
                for group in member.optimizer.param_groups
            ],
            member.grad_scaler.state_dict() if member.grad_scaler else None,
        )
        for member in parts_of(optimizer)
    ]


@torch.no_grad()
def take_over_own(optimizer: MegatronOptimizer, settings: list[Any]) -> None:
    """Apply settings, and update the optimizer and this rank's weights after :func:`own_tensors` were written."""
    for member, (groups, scaler) in zip(parts_of(optimizer), settings, strict=True):
        for group, numbers in zip(member.optimizer.param_groups, groups, strict=True):
            group.update(numbers)
        if member.grad_scaler:
            member.grad_scaler.load_state_dict(scaler)
        live = LiveStates(member)
        for bucket in buckets(member):
            for parameter in bucket.local:
                live.show(parameter)
        member._copy_main_params_to_model_params()


def trained_parameters(optimizer: MegatronOptimizer) -> set[torch.nn.Parameter]:
    """Return the parameters whose weights are rebuilt from the master weights of all ranks."""
    return {p for member in parts_of(optimizer) for bucket in buckets(member) for p in bucket.ranges}
