"""Process groups that every trainer has: one gloo group of all ranks, for objects and CPU tensors."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from slime.utils.errors import ProcessError

_GROUPS: dict[str, dist.ProcessGroup] = {}
"""By purpose, because torch.distributed has no such registry."""


def init_gloo_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Create the gloo group of all ranks on the first call, and return it; every rank must make that call.

    Args:
        timeout: longest wait of one collective; torch's default when None.
    """
    if "gloo" not in _GROUPS or not _is_alive(_GROUPS["gloo"]):
        _GROUPS["gloo"] = dist.new_group(backend="gloo", timeout=timeout)
    return _GROUPS["gloo"]


def _is_alive(group: dist.ProcessGroup) -> bool:
    """Return True when torch still knows the group: a process may leave one training group and join another."""
    return group in dist.distributed_c10d._world.pg_map


def get_gloo_group() -> dist.ProcessGroup:
    """Return the gloo group of all ranks."""
    if "gloo" not in _GROUPS:
        raise ProcessError("The gloo group does not exist yet; call init_gloo_group() on every rank first.")
    return _GROUPS["gloo"]
