"""One-process checks in processes of their own: a family that aborts or hangs takes no other family with it.

The processes are forked from a server that has imported torch, transformers and megatron-core once; a fresh start
would cost each of them ten seconds of CPU time.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from tests.matrix.case import load_cases
from tests.matrix.pool import fork_context
from tests.matrix.report import Cell

FAMILY_TIMEOUT_S = 240.0


def check_families(names: Sequence[str], checks: Sequence[str], *, jobs: int = 1) -> Iterator[Cell]:
    """The one-process cells of the named families, as they become known.

    Args:
        names: of cases.
        checks: of ``parity.CHECKS``.
        jobs: families checked at the same time, one core each.
    """
    context = fork_context()
    with ThreadPoolExecutor(jobs) as threads:
        runs = [threads.submit(_check_in_child, context, name, tuple(checks)) for name in names]
        for run in as_completed(runs):
            yield from run.result()


def _check_in_child(context: Any, name: str, checks: tuple[str, ...]) -> list[Cell]:
    receiver, sender = context.Pipe(duplex=False)
    start = time.monotonic()
    child = context.Process(target=_child_main, args=(name, checks, sender), daemon=True)
    child.start()
    sender.close()
    try:
        if not receiver.poll(FAMILY_TIMEOUT_S):
            raise TimeoutError(f"no answer within {FAMILY_TIMEOUT_S:.0f} s")
        return receiver.recv()
    except (EOFError, TimeoutError) as error:
        child.join(timeout=1)
        what = f"the process died with exit code {child.exitcode}" if isinstance(error, EOFError) else str(error)
        return [Cell(name, check, math.nan, 0.0, what, time.monotonic() - start) for check in checks]
    finally:
        child.join(timeout=5)
        if child.is_alive():
            child.kill()
        receiver.close()


def _child_main(name: str, checks: tuple[str, ...], sender: Any) -> None:
    import torch

    from tests.matrix.parity import check_family

    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    try:
        cells = check_family(load_cases([name])[name], checks)
    except BaseException:
        text = " ".join(traceback.format_exc().split())[-600:]
        cells = [Cell(name, check, math.nan, 0.0, text) for check in checks]
    sender.send(cells)
    sender.close()
