"""The cost of digests in a save and a load: the same checkpoint with them and without.

    python benchmarks/checkpoint_digests.py [--mib 512] [--rounds 5] [--folder DIR]

One process writes a ``torch_dist`` checkpoint of bf16 matrices and reads it back, in turns with digests and without;
"without" takes the place of the digest's arithmetic alone.  Printed: medians, their ratio, the median ratio of runs
that follow each other (what else the machine does is in both), and the speed of the digest by itself.  The page cache
holds what was written, so that a load is as fast, and digests as dear, as they get.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from slime.backends.megatron_utils.checkpoints.checkpoint_reader import CheckpointReader
from slime.backends.megatron_utils.checkpoints.checkpoint_writer import _FileWriter
from slime.weights import file_digests

ROWS = 4096
"""Of a matrix; with as many columns it has 32 MiB."""


class NoHash:
    """Takes the place of a digest that is being computed."""

    def update(self, data: Any) -> None:
        """Do nothing with the bytes."""

    def reset(self) -> None:
        """Begin anew."""

    def hexdigest(self) -> str:
        """Return what no reader compares."""
        return "0" * 16


def save(tensors: dict[str, torch.Tensor], folder: Path, *, digests: bool) -> float:
    """Write the checkpoint; return the seconds."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    original = file_digests.xxhash.xxh3_64
    if not digests:
        file_digests.xxhash.xxh3_64 = NoHash
    start = time.perf_counter()
    dcp.save(tensors, storage_writer=_FileWriter(folder, b"common", 2))
    elapsed = time.perf_counter() - start
    file_digests.xxhash.xxh3_64 = original
    return elapsed


def load(tensors: dict[str, torch.Tensor], folder: Path, *, digests: bool) -> float:
    """Read the checkpoint into ``tensors``; return the seconds."""
    start = time.perf_counter()
    dcp.load(tensors, storage_reader=CheckpointReader(folder, verify=digests))
    return time.perf_counter() - start


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5, help="times that each way is measured")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=options.folder))
    dist.init_process_group("gloo", init_method=f"file://{root}/store", world_size=1, rank=0)
    size = ROWS * ROWS * 2
    tensors = {
        f"layers.{index}.weight": torch.randn(ROWS, ROWS).bfloat16()
        for index in range(max(1, options.mib * 2**20 // size))
    }
    total = size * len(tensors)
    data = bytes(total)
    start = time.perf_counter()
    file_digests.digest_of(data)
    print(f"digest alone: {total / 1e9 / (time.perf_counter() - start):.1f} GB/s")
    for name, run in {"save": save, "load": load}.items():
        seconds: dict[bool, list[float]] = {True: [], False: []}
        save(tensors, root / "checkpoint", digests=True)
        for index in range(2 * options.rounds):
            digests = index % 2 == 0
            if name == "load":
                seconds[digests].append(load(tensors, root / "checkpoint", digests=digests))
            else:
                seconds[digests].append(run(tensors, root / "checkpoint", digests=digests))
        with_, without = (statistics.median(seconds[digests]) for digests in (True, False))
        paired = statistics.median(a / b for a, b in zip(seconds[True], seconds[False], strict=True))
        print(
            f"{name} of {total / 2**20:.0f} MiB: {with_:.3f} s with digests, {without:.3f} s without; "
            f"ratio {with_ / without:.3f}, of neighbours {paired:.3f} "
            f"(with: {min(seconds[True]):.3f}-{max(seconds[True]):.3f}, "
            f"without: {min(seconds[False]):.3f}-{max(seconds[False]):.3f})"
        )
    dist.destroy_process_group()
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
