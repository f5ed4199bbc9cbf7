"""Writing a ``torch_dist`` checkpoint in the calling process.

megatron-core's own strategy forks writer processes and talks to them over queues of a spawned manager: seconds of
start-up, and a wait without end when a writer dies.  This one plans with megatron-core and writes with torch's
file-system writer, in threads of this process.  The files are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

WRITER_THREADS = 2


class InProcessSaveStrategy(TorchDistSaveShardedStrategy):
    """``torch_dist``, version 1, written without helper processes; every file is synced to disk."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=WRITER_THREADS)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> Any:
        """Write this rank's shards and, on rank 0, the metadata.  Collective; returns when all is on disk."""
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        dcp.save(
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, thread_count=self.thread_count, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
