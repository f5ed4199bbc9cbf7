"""Printing, under its name in ``megatron.training.utils``."""

from __future__ import annotations

import torch.distributed as dist


def print_rank_0(message: str) -> None:
    """Print on rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)
