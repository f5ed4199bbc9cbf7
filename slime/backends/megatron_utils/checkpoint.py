"""Checkpoints of a training run: where they are stored, how they are written, and which one is current.

    {save}/iter_0000012/                     model, optimizer, scheduler, generators: one torch_dist checkpoint
    {save}/rollout/...                       the position in the data (written by the data source)
    {save}/latest_checkpointed_iteration.txt tracker file, "12" or "release": the checkpoint that a resumed run loads

A save has three steps, in this order: ``save_checkpoint``, the data source's own save, ``publish_checkpoint``.  The
tracker file is replaced atomically and last, so a run killed at any moment resumes from the previous save.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils.checkpoints.checkpoint_fit import check_fit, saved_shapes
from slime.backends.megatron_utils.checkpoints.checkpoint_loader import LOAD_ERRORS, first_cause, load_sharded
from slime.backends.megatron_utils.checkpoints.checkpoint_reader import FORMAT_FILE, CheckpointReader
from slime.backends.megatron_utils.checkpoints.checkpoint_writer import BackgroundSave, write_checkpoint
from slime.backends.megatron_utils.checkpoints.optimizer_state import optimizer_state, refresh_master_weights
from slime.backends.megatron_utils.checkpoints.resumed_state import (
    load_generators,
    load_optimizer,
    load_schedule,
    rng_state,
    schedule_state,
)
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.layers.value_head import find_value_head, take_out_unsaved_head
from slime.backends.megatron_utils.model_transform import AddedParameters, added_parameters
from slime.flags.checkpoint import TRACKER, inspect_checkpoint
from slime.flags.train import keeps_moments
from slime.utils.distributed_utils import object_of_first
from slime.utils.errors import DataError
from slime.utils.files import write_atomically
from slime.utils.redaction import redacted

logger = logging.getLogger(__name__)

RELEASE = "release"
CHECKPOINT_VERSION = 3.0


def checkpoint_folder(root: str | Path, iteration: int | str) -> Path:
    """Return ``root/iter_0000012``, or ``root/release``."""
    return Path(root) / (RELEASE if iteration == RELEASE else f"iter_{int(iteration):07d}")


# Saving


def save_checkpoint(
    args: Namespace,
    iteration: int | str,
    model: list[torch.nn.Module],
    optimizer: Any,
    opt_param_scheduler: Any,
    *,
    background: BackgroundSave | None = None,
) -> Path:
    """Write the checkpoint of ``iteration`` (or ``"release"``) without publishing it.  Collective.

    Any earlier content of the folder, such as a partial save by a killed run, is removed first.

    Args:
        args: complete flags; ``--save`` is the folder, ``--no-save-optim`` and ``--no-save-rng`` leave parts out.
        optimizer: None if nothing was trained.
        opt_param_scheduler: None without an optimizer.
        background: copies the state, writes it during training, and publishes it (``--async-save``).

    Returns:
        The checkpoint's folder.
    """
    folder = checkpoint_folder(args.save, iteration)
    start = time.monotonic()
    if background is not None:
        background.wait()
    make_empty_folder(folder)
    for chunk in model:
        if hasattr(chunk, "start_param_sync"):
            chunk.start_param_sync(force_sync=True)  # with overlapped all-gathers a rank may hold stale weights
    state = common_state(args, iteration)
    weights = model_state(model)
    state.update(weights)
    if optimizer is not None and not args.no_save_optim:
        state["optimizer"] = optimizer_state(optimizer, weights)
        state["opt_param_scheduler"] = schedule_state(opt_param_scheduler)
    elif optimizer is not None and not keeps_moments(args):
        state["opt_param_scheduler"] = schedule_state(opt_param_scheduler)  # an optimizer without moments has no state
    if not args.no_save_rng:
        state["rng_state"] = rng_state()
    write_checkpoint(state, folder, background=background)
    if dist.get_rank() == 0:
        verb = "Copied" if background is not None else "Wrote"
        logger.info("%s checkpoint %s in %.1f s", verb, folder, time.monotonic() - start)
    return folder


def make_empty_folder(folder: Path) -> None:
    """Create an empty folder, removing an old one.  Collective."""
    verdict = ""
    if dist.get_rank() == 0:
        try:
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
        except OSError as error:
            verdict = f"Cannot create the checkpoint folder {folder} ({error.strerror}); give another --save."
    if verdict := object_of_first(verdict):
        raise DataError(verdict)


def publish_checkpoint(
    save_dir: str | Path,
    iteration: int | str,
    *,
    keep_last: int | None = None,
    reference_of: Callable[[int], int | None] | None = None,
) -> None:
    """Make ``iteration`` the current checkpoint by replacing the tracker file atomically.  Call it on one rank only.

    Args:
        save_dir: ``--save``.
        keep_last: afterwards keep only this many checkpoints up to ``iteration``, the newest; None keeps all.
        reference_of: returns the checkpoint that holds the reference model of another one; it is kept beside that one.
    """
    content = str(iteration).encode()
    write_atomically(Path(save_dir, TRACKER), lambda file: file.write(content), what="Which checkpoint counts")
    if keep_last is not None and iteration != RELEASE:
        _remove_old(Path(save_dir), int(iteration), keep_last, reference_of)


def _remove_old(root: Path, iteration: int, keep_last: int, reference_of: Callable[[int], int | None] | None) -> None:
    """Remove old checkpoints up to ``iteration``.  Later ones stay: they belong to a run that this one rolled back."""
    found = sorted(int(path.name[5:]) for path in root.iterdir() if re.fullmatch(r"iter_\d{7}", path.name))
    found = [number for number in found if number <= iteration]
    whole = [number for number in found if (checkpoint_folder(root, number) / FORMAT_FILE).exists()]
    kept = {*whole[-keep_last:]}
    references = set() if reference_of is None else {reference_of(number) for number in kept}
    for old in sorted({*found} - kept - references):
        folder = checkpoint_folder(root, old)
        (folder / FORMAT_FILE).unlink(missing_ok=True)  # first, so that a half-removed folder is not a checkpoint
        shutil.rmtree(folder, ignore_errors=True)
        logger.info("Removed the checkpoint %s (--keep-last %d)", folder, keep_last)


def common_state(args: Namespace, iteration: int | str) -> dict[str, Any]:
    """Return the content of a checkpoint other than its tensors."""
    shown = vars(redacted(args))
    return {
        # The critic's arguments are in the critic's own checkpoint.
        "args": Namespace(**{name: _plain(value) for name, value in shown.items() if name != "critic_args"}),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": 1 if iteration == RELEASE else iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"format": "slime"},
    }


def _plain(value: Any) -> Any:
    """Return ``value`` in types that ``torch.load`` reads without trusting the file, anything else as its ``repr``.

    Plug-ins may put any object on ``args``; opening a checkpoint must need neither their modules nor ours.
    """
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return repr(value)


def model_state(model: list[torch.nn.Module]) -> dict[str, Any]:
    """Return the sharded state that is trained: the added parameters under ``model``, or else :func:`base_state`."""
    added = added_parameters(model)
    return base_state(model) if added is None else {"model": added.state(model)}


def base_state(model: list[torch.nn.Module]) -> dict[str, Any]:
    """Return the sharded state of every chunk without added parameters, under ``model``, or with virtual pipeline
    stages under ``model0``, ``model1``, ...
    """
    metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    chunks, added = unwrap_model(model), added_parameters(model)
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    states = (chunk.sharded_state_dict(metadata=metadata) for chunk in chunks)
    return {
        chunk: {name: entry for name, entry in state.items() if added is None or not added.owns(name)}
        for chunk, state in zip(names, states, strict=True)
    }


# Loading


def load_checkpoint(
    args: Namespace,
    model: list[torch.nn.Module],
    optimizer: Any = None,
    opt_param_scheduler: Any = None,
) -> int:
    """Load ``--load``, a Megatron checkpoint or a Hugging Face folder.  Collective.

    Only the weights are loaded with ``args.finetune``, from a ``release`` checkpoint and from a Hugging Face folder.

    Returns:
        The iteration of the checkpoint; 0 if only weights are loaded.

    Raises:
        ConfigError: there is no checkpoint, or it is incomplete.
        DataError: it is damaged, or does not fit the model's flags.
    """
    added = added_parameters(model)
    if added is not None:
        added.load_frozen(model)
        if added.load_first(model):
            _refresh(optimizer)
            return 0
    loaded = load_weights(args, model, args.load, added, flag="--load", step=args.ckpt_step)
    if loaded is None or loaded[1] == RELEASE or args.finetune:
        _refresh(optimizer)
        return 0
    reader, iteration, common = loaded
    if optimizer is not None:
        if not keeps_moments(args):
            _refresh(optimizer)
            if "opt_param_scheduler" in common and not args.no_load_optim:
                load_schedule(common, opt_param_scheduler)
        elif args.no_load_optim:
            _refresh(optimizer)
        else:
            load_optimizer(reader, common, model_state(model), optimizer, opt_param_scheduler)
    if not args.no_load_rng:
        load_generators(reader, common)
    logger.info("Resumed from %s", reader.folder)
    return int(iteration)


def load_weights(
    args: Namespace,
    model: list[torch.nn.Module],
    root: str | None,
    added: AddedParameters | None = None,
    *,
    flag: str,
    step: int | None,
    step_flag: str = "--ckpt-step",
) -> tuple[CheckpointReader, int | str, dict[str, Any]] | None:
    """Load only weights, from a Megatron checkpoint or a Hugging Face folder.  Collective.

    Args:
        added: the transform whose parameters are loaded; None loads all other parameters.
        flag: the flag that named ``root``, for messages.
        step: an iteration of a Megatron checkpoint; None for the latest.
        step_flag: the flag of ``step``, for messages.

    Returns:
        The checkpoint, its iteration and its common (unsharded) state; None for a Hugging Face folder.

    Raises:
        SlimeError: as :func:`load_checkpoint`.
    """
    found = inspect_checkpoint(root, flag, step, step_flag=step_flag)
    if found.iteration is None:
        load_hf_weights(args, unwrap_model(model), str(found.folder))
        return None
    try:
        reader = CheckpointReader(found.folder, verify=args.verify_checkpoint)
        common = reader.read_common()
    except DataError as error:
        raise DataError(f"{flag}: {error}") from error
    if added is not None and not any(map(added.owns, saved_shapes(reader))):
        raise DataError(
            f"{flag} {root} holds a whole model, and {added.claim}; give the model to begin with as --ref-load."
        )
    saved_args = common.get("args")
    _load_model(vars(args), reader, saved_args, model, flag, added)
    if added is not None and saved_args is not None:
        added.check_saved(saved_args, f"{flag} {found.folder}")
    logger.info("Loaded the weights of %s", found.folder)
    return reader, found.iteration, common


def _load_model(
    flags: Mapping[str, Any],
    reader: CheckpointReader,
    saved_args: Any,
    model: list[torch.nn.Module],
    flag: str,
    added: AddedParameters | None,
) -> None:
    folder = reader.folder
    wanted = base_state(model) if added is None else model_state(model)
    must_know = dist.get_rank() == 0 or find_value_head(model) is not None
    saved = saved_shapes(reader) if must_know else {}
    fresh_head = take_out_unsaved_head(model, wanted, saved)
    check_fit(flags, folder, saved, wanted, saved_args, flag, unread=fresh_head)
    if fresh_head:
        logger.info("%s: the critic's value head is not in %s; it starts from random weights", flag, folder)
    try:
        state = load_sharded(wanted, reader)
        if added is not None:
            added.load_state(model, state["model"])
            return
        transform = added_parameters(model)
        for of_chunk, chunk in zip(wanted, unwrap_model(model), strict=True):
            has_head = find_value_head([chunk]) is not None
            kept = {} if transform is None else dict(transform.named_parameters(chunk))
            chunk.load_state_dict(state[of_chunk] | kept | (fresh_head if has_head else {}))
    except LOAD_ERRORS as error:
        raise DataError(f"{flag}: the checkpoint {folder} cannot be loaded: {first_cause(error)}") from error


def _refresh(optimizer: Any) -> None:
    """Copy freshly loaded weights into the optimizer's fp32 masters."""
    if optimizer is not None:
        refresh_master_weights(optimizer)
