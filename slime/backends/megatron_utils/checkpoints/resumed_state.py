"""Loads the state of a resumed run other than the weights: optimizer, schedule, random generators."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from slime.backends.megatron_utils.checkpoints.checkpoint_loader import LOAD_ERRORS, first_cause, load_sharded
from slime.backends.megatron_utils.checkpoints.checkpoint_reader import CheckpointReader
from slime.backends.megatron_utils.checkpoints.optimizer_state import load_optimizer_state
from slime.utils.errors import DataError

logger = logging.getLogger(__name__)


def load_optimizer(
    reader: CheckpointReader,
    common: dict[str, Any],
    model_state: dict[str, Any],
    optimizer: Any,
    opt_param_scheduler: Any,
) -> None:
    """Load optimizer and schedule.  Collective; load the weights first.

    Raises:
        DataError: the checkpoint has no optimizer state, or that of other parameters.
    """
    if "optimizer" not in common:
        raise DataError(
            f"--load: {reader.folder} has no optimizer state (it was saved with --no-save-optim); pass "
            "--no-load-optim to continue with a fresh optimizer"
        )
    flags_rule = opt_param_scheduler is None or not opt_param_scheduler.use_checkpoint_opt_param_scheduler
    try:
        load_optimizer_state(optimizer, model_state, reader, keep_learning_rates=flags_rule)
    except LOAD_ERRORS as error:
        raise DataError(
            f"--load: the optimizer state of {reader.folder} cannot be loaded: {first_cause(error)}. Were other "
            "parameters trained (--freeze-params-name-list, --only-train-params-name-list)? Pass --no-load-optim to "
            "continue with a fresh optimizer."
        ) from error
    if opt_param_scheduler is not None:
        # After the optimizer: both set the learning rate, and the scheduler must win.
        load_schedule(common, opt_param_scheduler)


_NOT_IN_STATE = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")
"""Attributes of a schedule that megatron-core's ``state_dict`` leaves out."""
_LENGTHS = {"lr_decay_steps": "lr_decay_style", "wd_incr_steps": "wd_incr_style"}
"""Attributes of a schedule that have no effect if the style they map to is ``constant``."""


def schedule_state(opt_param_scheduler: Any) -> dict[str, Any]:
    """Return the complete schedule and the current position on it."""
    return opt_param_scheduler.state_dict() | {name: getattr(opt_param_scheduler, name) for name in _NOT_IN_STATE}


def load_schedule(common: dict[str, Any], opt_param_scheduler: Any) -> None:
    """Load the position on the schedule, and with ``--use-checkpoint-opt-param-scheduler`` the schedule."""
    saved = common["opt_param_scheduler"]
    if not opt_param_scheduler.use_checkpoint_opt_param_scheduler:
        saved = _flags_schedule(schedule_state(opt_param_scheduler), saved)
    vars(opt_param_scheduler).update({name: saved[name] for name in _NOT_IN_STATE if name in saved})
    opt_param_scheduler.load_state_dict(saved)
    opt_param_scheduler.step(increment=0)  # applies the saved weight decay, which load_state_dict sets after its step


def _flags_schedule(ours: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return the schedule of this run's flags at the saved position; log how the saved schedule differs."""
    idle = {name for name, style in _LENGTHS.items() if ours[style] == saved.get(style) == "constant"}
    differing = [name for name in ours.keys() - idle - {"num_steps"} if saved.get(name, ours[name]) != ours[name]]
    if differing:
        changes = ", ".join(f"{name} {saved[name]} -> {ours[name]}" for name in sorted(differing))
        logger.warning("The flags change the schedule of the checkpoint (in samples): %s", changes)
    return ours | {"num_steps": saved["num_steps"]}


def load_generators(reader: CheckpointReader, common: dict[str, Any]) -> None:
    """Load the random generators if the checkpoint was saved by as many ranks; otherwise log a warning.

    Raises:
        DataError: they cannot be read.
    """
    saved_ranks = getattr(common.get("args"), "world_size", None)
    if saved_ranks != dist.get_world_size():
        logger.warning(
            "%s was saved by %s ranks and this run has %d: the random generators start from --seed",
            reader.folder,
            saved_ranks,
            dist.get_world_size(),
        )
        return
    try:
        state = load_sharded({"rng_state": rng_state()}, reader, validate_access_integrity=False)
    except LOAD_ERRORS as error:
        raise DataError(
            f"--load: the random generators of {reader.folder} cannot be loaded: {first_cause(error)}. Pass "
            "--no-load-rng to start them from --seed."
        ) from error
    set_generators(state["rng_state"])


def rng_state() -> ShardedObject:
    """Return this rank's generator states, keyed by its rank.  A run with another number of ranks cannot load them."""
    state: dict[str, Any] = {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng_state", state, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def set_generators(state: dict[str, Any]) -> None:
    """Restore every random generator of this rank."""
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
