"""The accelerator's memory: report it, and free what caches hold.

Without CUDA every function here returns at once.  What a sleeping trainer gives back: ``sleep``.
"""

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
"""Of an engine beside ``--sglang-mem-fraction-static``: CUDA graphs, and the activations of a prefill."""


def sleeps(offload_train: bool) -> bool:
    """Return True when a trainer gives its memory back while it sleeps: on a CPU there is none to."""
    return offload_train and torch.cuda.is_available()


def has_room_for_engines(mem_fraction_static: float) -> bool:
    """Return True on all ranks when each of their cards has room for engines, asleep now, beside what is on it.

    Collective.
    """
    clear_memory()
    free, total = torch.cuda.mem_get_info()
    room = torch.tensor(free - ENGINE_WORK_BYTES - int(mem_fraction_static * total))
    dist.all_reduce(room, op=dist.ReduceOp.MIN, group=get_gloo_group())
    logger.info("Beside awake engines and this trainer, awake, %.2f GiB are left.", room.item() / 2**30)
    return room.item() >= 0


def clear_memory() -> None:
    """Collect garbage and return the allocator's cached blocks."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    empty_cache()


def empty_cache() -> None:
    """Return the allocator's cached blocks, also those of which another process has mapped a part and let it go."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def freeze_long_lived_objects() -> None:
    """Take all present objects out of garbage collection: they live as long as the process.

    Half a million of them are modules; without this, the collection before each sleep takes longer than a small step.
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
    """Begin to measure the peak of the work that follows."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """Return the most that this rank has allocated since :func:`restart_peak`; without an accelerator, ever held.

    Of what torch allocates, as ``tools/plan.py`` states it: CUDA's context and NCCL come on top.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@contextmanager
def naming_flags(size: str) -> Iterator[None]:
    """Add to an out-of-memory error of the work inside which flags lower what it needs; ``size`` is the first."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(
            f"Lower {size}, recompute activations (--recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1), or let --fit choose; --plan prints what a step of this command needs. "
            "From the second step on the optimizer's moments are there too."
        )
        raise
