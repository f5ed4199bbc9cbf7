"""The accelerator's memory: report it, free what caches hold, let it go while the trainer sleeps.

Sleeping needs torch_memory_saver, loaded into the process by ``LD_PRELOAD`` (``--offload-train`` on CUDA).  Without
CUDA every function here returns at once: there is nothing to let go.
"""

from __future__ import annotations

import gc
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from slime.utils import env

logger = logging.getLogger(__name__)


def is_memory_saver_active() -> bool:
    """Return True when this process was started with the memory saver around all its allocations."""
    return torch.cuda.is_available() and env.get_bool("TMS_INIT_ENABLE")


def _saver() -> Any:
    from torch_memory_saver import torch_memory_saver

    return torch_memory_saver


def choose_memory_saver_hook() -> None:
    """Make the memory saver talk to its preloaded hook; call after megatron.core was imported and before first use.

    megatron.core 0.16.1 sets the mode to "torch" when it is imported; then ``disable`` would not reach the preloaded
    hook, and memory shared with an engine could not be mapped ("invalid argument").
    """
    if is_memory_saver_active():
        _saver().hook_mode = "preload"


@contextmanager
def memory_saver_disabled() -> Iterator[None]:
    """Allocate without the memory saver: such memory can be shared, and survives while the trainer sleeps."""
    if not is_memory_saver_active():
        yield
        return
    with _saver().disable():
        yield
        torch.cuda.synchronize()


def pause_memory() -> None:
    """Move what the saver holds to the host and give its memory back.

    Until ``resume_memory``, allocate only inside :func:`memory_saver_disabled`: the allocator's free blocks have no
    memory behind them, and the saver ends the process when it meets a new block while it resumes the old ones.
    """
    if is_memory_saver_active():
        torch.cuda.synchronize()
        clear_memory()
        _saver().pause()


def resume_memory() -> None:
    """Take the memory again, with what was in it."""
    if is_memory_saver_active():
        _saver().resume()


def clear_memory() -> None:
    """Collect garbage and return the allocator's cached blocks."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def freeze_long_lived_objects() -> None:
    """Take all present objects out of garbage collection: they live as long as the process.

    Half a million of them are modules; without this, the collection before each sleep takes longer than a small step.
    """
    gc.collect()
    gc.freeze()


def report(moment: str) -> dict[str, float]:
    """Log and return the accelerator's memory in GiB; empty without one."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    numbers = {
        "total": total / 2**30,
        "used": (total - free) / 2**30,
        "allocated": torch.cuda.memory_allocated() / 2**30,
        "reserved": torch.cuda.memory_reserved() / 2**30,
        "peak allocated": torch.cuda.max_memory_allocated() / 2**30,
    }
    logger.info("Memory %s: %s GiB", moment, ", ".join(f"{name} {value:.2f}" for name, value in numbers.items()))
    return numbers


def restart_peak() -> None:
    """Forget the peak of what came before: from here on it is that of the work that follows."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """Return the most that this rank has allocated since :func:`restart_peak`; without an accelerator, ever held.

    Of what torch allocates, as ``tools/plan.py`` states it: CUDA's context and NCCL come on top.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def peak_metrics() -> dict[str, float]:
    """Return ``perf/train_peak_memory_gib``, :func:`peak_gib`.  Empty without an accelerator."""
    return {"perf/train_peak_memory_gib": peak_gib()} if torch.cuda.is_available() else {}
