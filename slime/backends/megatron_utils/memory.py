"""Reports the accelerator's memory, and frees caches.  A sleeping trainer's memory is in ``sleep``."""

from __future__ import annotations

import gc
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from slime.utils.distributed_utils import get_gloo_group

logger = logging.getLogger(__name__)

ENGINE_WORK_BYTES = 6 * 2**30
"""Memory that an engine needs besides ``--sglang-mem-fraction-static``: CUDA graphs and prefill activations."""


def sleeps(offload_train: bool) -> bool:
    """Return True if a trainer frees its memory while it sleeps; on a CPU there is none to free."""
    return offload_train and torch.cuda.is_available()


def has_room_for_engines(mem_fraction_static: float) -> bool:
    """Return whether the currently sleeping engines fit beside the trainer on the GPU of every rank.  Collective."""
    clear_memory()
    free, total = torch.cuda.mem_get_info()
    room = torch.tensor(free - ENGINE_WORK_BYTES - int(mem_fraction_static * total))
    dist.all_reduce(room, op=dist.ReduceOp.MIN, group=get_gloo_group())
    logger.info("With the engines and this trainer awake, %.2f GiB would be free.", room.item() / 2**30)
    return room.item() >= 0


def clear_memory() -> None:
    """Collect garbage and return the allocator's cached blocks."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    empty_cache()


def empty_cache() -> None:
    """Return the allocator's cached blocks to the device, including blocks that another process has unmapped."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def freeze_long_lived_objects() -> None:
    """Exclude all current objects from garbage collection: they live as long as the process.

    There are half a million of them, most from imported modules; otherwise the collection before each sleep would take
    longer than a small step.
    """
    gc.collect()
    gc.freeze()


def report(moment: str) -> None:
    """Log the accelerator's memory in GiB."""
    if not torch.cuda.is_available():
        return
    free, total = torch.cuda.mem_get_info()
    numbers = {
        "total": total / 2**30,
        "used": (total - free) / 2**30,
        "allocated": torch.cuda.memory_allocated() / 2**30,
        "reserved": torch.cuda.memory_reserved() / 2**30,
        "peak allocated": torch.cuda.max_memory_allocated() / 2**30,
    }
    logger.info("Memory %s: %s GiB", moment, ", ".join(f"{name} {value:.2f}" for name, value in numbers.items()))


def restart_peak() -> None:
    """Reset the peak that :func:`peak_gib` returns."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """Return this rank's peak memory in GiB: torch's allocations since :func:`restart_peak`.

    CUDA's context and NCCL are not included, as in ``tools/plan.py``.  Without an accelerator it is the peak resident
    memory of the process.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@contextmanager
def naming_flags(size: str) -> Iterator[None]:
    """Add a note to out-of-memory errors of the body: which flags lower its memory, first the one in ``size``."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(
            f"Lower {size}, recompute activations (--recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1), or let --fit choose; --plan prints the memory that a step of this command "
            "needs. From the second step on, the optimizer's moments take memory too."
        )
        raise
