"""The cost of digests in a save and a load: the same checkpoint with them and without.

    python benchmarks/checkpoint_digests.py [--mib 512] [--rounds 5] [--folder DIR] [--json FILE]

One process writes a ``torch_dist`` checkpoint of bf16 matrices and reads it back, in turns with digests and without;
"without" takes the place of the digest's arithmetic alone.  Printed: medians, their ratio, the median ratio of runs
that follow each other (what else the machine does is in both), the same of the process's CPU seconds, and the speed of
the digest by itself.  The page cache
holds what was written, so that a load is as fast, and digests as dear, as they get.
"""

from __future__ import annotations

import argparse
import json
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


Times = tuple[float, float]
"""Seconds of the clock, and of the CPU in all threads."""


def now() -> Times:
    """Return both clocks."""
    return time.perf_counter(), time.process_time()


def since(start: Times) -> Times:
    """Return what has passed."""
    wall, cpu = now()
    return wall - start[0], cpu - start[1]


def save(tensors: dict[str, torch.Tensor], folder: Path, *, digests: bool) -> Times:
    """Write the checkpoint; return the seconds."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    original = file_digests.xxhash.xxh3_64
    if not digests:
        file_digests.xxhash.xxh3_64 = NoHash
    start = now()
    dcp.save(tensors, storage_writer=_FileWriter(folder, b"common", 2))
    elapsed = since(start)
    file_digests.xxhash.xxh3_64 = original
    return elapsed


def load(tensors: dict[str, torch.Tensor], folder: Path, *, digests: bool) -> Times:
    """Read the checkpoint into ``tensors``; return the seconds."""
    start = now()
    dcp.load(tensors, storage_reader=CheckpointReader(folder, verify=digests))
    return since(start)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5, help="times that each way is measured")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="file for the numbers")
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
    start = now()
    file_digests.digest_of(data)
    results: dict[str, Any] = {"mib": total / 2**20, "digest_gb_per_cpu_s": total / 1e9 / since(start)[1]}
    print(f"digest alone: {results['digest_gb_per_cpu_s']:.1f} GB per CPU second")
    for name, run in {"save": save, "load": load}.items():
        times: dict[bool, list[Times]] = {True: [], False: []}
        save(tensors, root / "checkpoint", digests=True)
        for index in range(2 * options.rounds):
            digests = index % 2 == 0
            times[digests].append(run(tensors, root / "checkpoint", digests=digests))
        for clock, which in (("wall", 0), ("cpu", 1)):
            with_, without = ([each[which] for each in times[digests]] for digests in (True, False))
            paired = statistics.median(a / b for a, b in zip(with_, without, strict=True))
            results[f"{name}_{clock}"] = {"with_s": with_, "without_s": without, "ratio_of_neighbours": paired}
            fastest = min(with_) / min(without)
            results[f"{name}_{clock}"]["ratio_of_fastest"] = fastest
            print(
                f"{name} of {total / 2**20:.0f} MiB, {clock}: {statistics.median(with_):.3f} s with digests, "
                f"{statistics.median(without):.3f} s without; ratio of neighbours {paired:.3f}, "
                f"of the fastest {fastest:.3f} (with: {min(with_):.3f}-{max(with_):.3f}, "
                f"without: {min(without):.3f}-{max(without):.3f})"
            )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
