"""Measure all-reduce over all GPUs of this machine with NCCL; without two GPUs, over two processes with gloo.

    python tools/all_reduce.py [--mib 256]

Prints JSON: backend, ranks, and the bus bandwidth in GB/s, 2 (n - 1) / n bytes of the buffer per rank and second.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slime.flags.kinds import positive_int

WARM_UP, TIMES, RANKS_ON_CPU = 3, 10, 2
TIMEOUT_S = 60


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=positive_int, help="Size of the buffer. Default: 1024 on GPUs, 16 without.")
    options = parser.parse_args()
    has_gpus = torch.cuda.device_count() >= 2
    ranks = torch.cuda.device_count() if has_gpus else RANKS_ON_CPU
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_rank, (ranks, store.port, options.mib or (1024 if has_gpus else 16), has_gpus), nprocs=ranks)


def _rank(rank: int, ranks: int, port: int, mib: int, has_gpus: bool) -> None:
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    if has_gpus:
        torch.cuda.set_device(rank)
    backend = "nccl" if has_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    data = torch.ones(mib << 18, device="cuda" if has_gpus else "cpu")
    for _ in range(WARM_UP):
        dist.all_reduce(data)
    _wait(has_gpus)
    start = time.perf_counter()
    for _ in range(TIMES):
        dist.all_reduce(data)
    _wait(has_gpus)
    speed = TIMES * data.nbytes * 2 * (ranks - 1) / ranks / (time.perf_counter() - start) / 1e9
    if rank == 0:
        print(json.dumps({"backend": backend, "ranks": ranks, "gb_per_s": round(speed, 2)}), flush=True)
    dist.destroy_process_group()


def _wait(has_gpus: bool) -> None:
    if has_gpus:
        torch.cuda.synchronize()
    dist.barrier()


if __name__ == "__main__":
    main()
