"""Device-agnostic access to this process's accelerator, for plug-ins: wraps torch's module for it.

``SLIME_ACCELERATOR`` names the kind (cuda, cpu); the default is cuda if available, else cpu.  Functions not defined
here are looked up in torch's module for that kind (``torch.cuda``).
"""

from __future__ import annotations

from typing import Any

import torch

from slime.utils import env
from slime.utils.errors import ConfigError


def device_type() -> str:
    """Return the kind of accelerator, as accepted by ``torch.device``.

    Raises:
        ConfigError: ``SLIME_ACCELERATOR`` names a kind that torch does not have.
    """
    kind = env.accelerator()
    if kind is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not hasattr(getattr(torch, kind, None), "current_device"):
        raise ConfigError(f"SLIME_ACCELERATOR is {kind!r}; torch {torch.__version__} has no module torch.{kind}.")
    return kind


def _module() -> Any:
    return getattr(torch, device_type())


def is_available() -> bool:
    """Return True if there is an accelerator other than the CPU."""
    return device_type() != "cpu" and bool(_module().is_available())


def current_device() -> Any:
    """Return this process's device: an index, or "cpu"."""
    return _module().current_device()


def set_device(device: Any) -> None:
    """Set this process's device."""
    if is_available():
        _module().set_device(device)


def device_count() -> int:
    """Return the number of accelerators visible to this process; 0 without one."""
    return int(_module().device_count()) if is_available() else 0


def synchronize() -> None:
    """Wait for all work on the device."""
    if is_available():
        _module().synchronize()


def empty_cache() -> None:
    """Release the allocator's cached blocks."""
    if is_available():
        _module().empty_cache()


def memory_allocated() -> int:
    """Return the bytes held by tensors; 0 without an accelerator."""
    return int(_module().memory_allocated()) if is_available() else 0


def memory_reserved() -> int:
    """Return the bytes held by the allocator; 0 without an accelerator."""
    return int(_module().memory_reserved()) if is_available() else 0


def mem_get_info() -> tuple[int, int]:
    """Return the device's free and total bytes; zeros without an accelerator."""
    if not is_available():
        return 0, 0
    free, total = _module().mem_get_info()
    return int(free), int(total)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_module(), name)
