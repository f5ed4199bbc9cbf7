"""Host memory and seconds of saving GPU tensors, against torch's own planner, which keeps every copy.

    python benchmarks/save_memory.py [--gib 12] [--rounds 2] [--folder DIR]

Both write the same ``torch_dist`` checkpoint, in alternation, after a warm-up.  Memory is the peak growth of the
process, without files in the page cache.  On a CPU no planner copies anything.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

from slime.backends.megatron_utils.checkpoints.checkpoint_writer import HostPlanner, write_checkpoint

GIB = 2**30
TENSOR_BYTES = 2**27
LOOK_S = 0.02
"""Seconds between two readings of the memory."""


class PlannerOfTorch(HostPlanner):
    """Leaves the copies to torch's writer, which keeps them until its file is complete."""

    def resolve_data(self, write_item: Any) -> Any:
        """Return the tensor where it is."""
        return MCoreSavePlanner.resolve_data(self, write_item)


class Growth:
    """GiB by which this process's own memory grows at its peak within the block."""

    def __enter__(self) -> Growth:
        self._before = self._peak = own_gib()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._end.wait(LOOK_S):
            self._peak = max(self._peak, own_gib())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.gib = self._peak - self._before


def own_gib() -> float:
    """Return the memory that belongs only to this process, without files."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024 / GIB


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=12, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=2, help="saves that are measured of each")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=options.folder))
    dist.init_process_group("gloo", init_method=f"file://{root}/store", world_size=1, rank=0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = max(1, round(options.gib * GIB / TENSOR_BYTES))
    tensors = {f"layers.{index}.weight": torch.randn(TENSOR_BYTES // 4, device=device) for index in range(count)}
    ways = {"torch's planner": PlannerOfTorch, "HostPlanner": HostPlanner}
    for name, planner in [("warm-up", HostPlanner), *[*ways.items()] * options.rounds]:
        state = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}
        folder = root / "checkpoint"
        folder.mkdir()
        began_s = time.monotonic()
        with Growth() as growth:
            write_checkpoint(state, folder, planner=planner())
        print(f"{name}: {options.gib:g} GiB in {time.monotonic() - began_s:.1f} s, host memory + {growth.gib:.2f} GiB")
        shutil.rmtree(folder)
    dist.destroy_process_group()
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
