"""The states of every random generator of a rank, as one sharded object of the checkpoint."""

from __future__ import annotations

import random
from typing import Any

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

KEY = "rng_state"


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
    return ShardedObject(KEY, state, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def load_rng_state(state: dict[str, Any]) -> None:
    """Put every generator of this rank back into a saved state."""
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
