"""Gloo processes for many cells, forked from one server that has imported everything.

A new process needs ten seconds of processor time for its imports, a cell often less than one.  A fork of the server
costs almost nothing, so every piece of work gets new ones: megatron-core's autograd hooks keep a model and all of its
process groups alive forever, and each gloo group has threads, so a reused process would soon have hundreds.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = (
    "tests.matrix.torchvision_first",  # transformers looks for it once
    "tests.matrix.layout_rank",
    "tests.matrix.parity",
    *(f"tests.matrix.families.{path.stem}" for path in sorted(Path(__file__).with_name("families").glob("*.py"))),
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",  # also imports all of scipy that a model needs
    "transformers.models.auto.processing_auto",
    "slime.backends.megatron_utils.arguments",
    "slime.backends.megatron_utils.flags.check_arguments",
    "slime.ext.lora.targets",
    "slime.rollout.data_source",
    "slime.rollout.sglang_rollout",  # the check of the flags imports it
    "tools.convert_hf_to_torch_dist",
    "tools.convert_torch_dist_to_hf",
)
"""Imported once, before the processes are forked; a process has one such server for all users."""
COLLECTIVE_TIMEOUT_S = 100
"""A rank that waits longer for the others fails."""
MAX_PATIENCE = 6.0
GRACE_S = 3.0
"""Seconds after the first failure in which others may report theirs, which often say more."""


def patience() -> float:
    """Return how many times longer than on an idle machine a rank may take now.

    Deadlines exist to find ranks that hang; where twelve processes share two cores, a rank may just be slow.
    """
    return min(MAX_PATIENCE, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def fork_context() -> Any:
    """Return the ``multiprocessing`` context whose processes are forked from that server."""
    if torch.cuda.is_available():  # a fork of a process that has initialized CUDA cannot use it
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


class RankError(Exception):
    """A rank failed, died or gave no answer."""


class RankPool:
    """Runs functions on several gloo ranks at once.

    Use as a context manager; the processes end with it.
    """

    def __init__(self) -> None:
        self._context = fork_context()
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self._drop()

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *arguments: Any,
        timeout_s: float = 120,
        joins_world: bool = True,
    ) -> list[Any]:
        """Run ``function(*arguments)`` on every rank of a new gloo world; return the results in rank order.

        Args:
            function: importable by name; arguments and results must pickle.
            world_size: number of ranks.
            timeout_s: for all of them together, on an idle machine.
            joins_world: False calls ``function(rank, world_size, *arguments)``, which creates the world itself.

        Raises:
            RankError: with the traceback of the rank that failed first.
        """
        self._ranks = [self._start() for _ in range(world_size)]
        timeout_s *= patience()
        with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
            for rank in range(world_size):
                stack = (timeout_s * 0.95, str(Path(folder) / f"stack-{rank}"))
                store = str(Path(folder) / "store") if joins_world else None
                job = (function, rank, world_size, store, stack, arguments)
                self._ranks[rank][1].send_bytes(pickle.dumps(job))
            try:
                return self._collect(world_size, timeout_s, Path(folder))
            finally:
                self._drop()

    def _collect(self, world_size: int, timeout_s: float, folder: Path) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) + len(failures) < world_size:
            waiting = {self._ranks[rank][1]: rank for rank in range(world_size) if rank not in results | failures}
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    value, error = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    self._ranks[rank][0].join(1)
                    value, error = None, f"the process died, exit code {self._ranks[rank][0].exitcode}"
                if error is None:
                    results[rank] = value
                else:
                    failures[rank] = error
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(results) == world_size:
            return [results[rank] for rank in range(world_size)]
        silent = [rank for rank in range(world_size) if rank not in results and rank not in failures]
        if not failures:
            where = [(folder / f"stack-{rank}").read_text() for rank in silent if (folder / f"stack-{rank}").exists()]
            raise RankError(f"ranks {silent} of {world_size} gave no answer in {timeout_s:g} s\n" + "\n".join(where))
        # Of several failures, ranks that merely lost a peer say the least.
        rank = min(failures, key=lambda r: ("gloo" in failures[r] or "Connection" in failures[r], r))
        raise RankError(f"rank {rank} of {world_size}: {failures[rank]}")

    def _start(self) -> tuple[BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,))  # not a daemon, which could not have children
        process.start()
        theirs.close()
        return process, ours

    def _drop(self) -> None:
        """End the processes of this piece of work."""
        for process, connection in self._ranks:
            connection.close()
            if process.is_alive():
                process.kill()
            process.join(5)
        self._ranks = []


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 250) -> list[Any]:
    """Run ``function(*arguments)`` on every rank of a new gloo world; return the results in rank order."""
    with RankPool() as pool:
        return pool.run(function, world_size, *arguments, timeout_s=timeout_s)


def _serve(connection: Connection) -> None:
    """A process: one job, one answer."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # megatron-core's advice for GPUs and torch's deprecations, once per process each
    logging.disable(logging.INFO)
    try:
        job = connection.recv_bytes()
    except (EOFError, OSError):
        return
    try:
        function, rank, world_size, store, (patience_s, stack), arguments = pickle.loads(job)
        with open(stack, "w") as file:
            faulthandler.dump_traceback_later(patience_s, file=file)  # shows where a rank hangs
            answer = (_in_world(function, rank, world_size, store, arguments), None)
            faulthandler.cancel_dump_traceback_later()
    except BaseException:  # noqa: BLE001 - the parent reports it
        answer = (None, traceback.format_exc())
    try:
        connection.send_bytes(pickle.dumps(answer))
    except (BrokenPipeError, OSError):
        return


def _in_world(
    function: Callable[..., Any], rank: int, world_size: int, store: str | None, arguments: tuple[Any, ...]
) -> Any:
    """Call the function; with a store inside a default process group, and with a GPU if there are any."""
    if store is None:
        return function(rank, world_size, *arguments)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S * patience()),
    )
    return function(*arguments)
