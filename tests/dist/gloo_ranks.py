"""Run a function on several real gloo ranks, each a fresh process, and collect what they return."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank_main(
    function: Callable[..., Any], rank: int, world_size: int, store: str, results: Any, arguments: tuple[Any, ...]
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=90),
        )
        results.put((rank, function(*arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 150) -> list[Any]:
    """``function(*arguments)`` on every rank of a fresh gloo world; gives the results in rank order.

    ``function`` must be importable by name; its result must pickle (no tensors with storage: use ``tolist``).
    """
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=_rank_main, args=(function, rank, world_size, store, results, arguments))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        outcome: dict[int, Any] = {}
        try:
            for _ in range(world_size):
                try:
                    rank, value, error = results.get(timeout=timeout_s)
                except Empty:
                    raise AssertionError(
                        f"ranks {sorted(set(range(world_size)) - set(outcome))} gave no answer"
                    ) from None
                assert error is None, f"rank {rank} failed:\n{error}"
                outcome[rank] = value
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
    return [outcome[rank] for rank in range(world_size)]
