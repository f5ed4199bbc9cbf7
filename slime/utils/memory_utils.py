"""Accelerator memory for plug-ins and drivers: free caches, query and log free memory."""

from __future__ import annotations

import gc
import logging

import torch

from slime.utils import accelerator

__all__ = ["available_memory", "clear_memory", "print_memory"]

logger = logging.getLogger(__name__)


def clear_memory(clear_host_memory: bool = False) -> None:
    """Collect garbage and release the allocator's cached blocks, optionally those of pinned host memory too."""
    accelerator.synchronize()
    gc.collect()
    accelerator.empty_cache()
    if clear_host_memory and torch.cuda.is_available():
        torch._C._host_emptyCache()


def available_memory() -> dict[str, str | float]:
    """Return the memory of this process's accelerator in GiB: total, free, used, allocated, reserved.

    All are 0 without an accelerator.
    """
    free, total = accelerator.mem_get_info()
    figures = {
        "total_GB": total,
        "free_GB": free,
        "used_GB": total - free,
        "allocated_GB": accelerator.memory_allocated(),
        "reserved_GB": accelerator.memory_reserved(),
    }
    return {"gpu": str(accelerator.current_device())} | {k: round(v / 2**30, 2) for k, v in figures.items()}


def print_memory(msg: str, clear_before_print: bool = False) -> dict[str, str | float]:
    """Log :func:`available_memory` with ``msg``; return it."""
    if clear_before_print:
        clear_memory()
    memory = available_memory()
    logger.info("Memory usage %s%s: %s", msg, " (cleared before)" if clear_before_print else "", memory)
    return memory
