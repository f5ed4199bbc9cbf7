"""Clean-up after tests: what they opened in this process, and the processes of failed ones.

A test that exceeds its limit fails alone (``timeout_method = "signal"``), but what it started keeps running: servers,
ranks of a job, a Ray.  Every process inherits a mark from the test process that started it, so whatever a failed test
left behind is found however far it has detached itself.  Processes of fixtures that later tests share are older than
the test and stay.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator

import psutil
import pytest

from slime.utils.torchvision_package import import_torchvision

MARK = "SLIME_TEST_PROCESS"
"""Environment variable whose value identifies the test process; one for each pytest-xdist worker."""
CLOCK_TOLERANCE_S = 0.1
"""Start times of processes have a resolution of 10 ms."""


def pytest_configure(config: pytest.Config) -> None:
    import_torchvision()  # transformers looks for it once, and tests with images share processes with others
    os.environ[MARK] = uuid.uuid4().hex
    os.environ["SLIME_CACHE_DIR"] = f"{tempfile.gettempdir()}/slime-cache-{os.environ[MARK]}"  # for these tests alone
    # Ray starts its workers at nice 15: beside a few busy processes, a job would get a fiftieth of the machine.
    os.environ["RAY_worker_niceness"] = "0"


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["SLIME_CACHE_DIR"], ignore_errors=True)


def processes_since(start_s: float) -> list[psutil.Process]:
    """Return the live processes that this test process started, directly or not, after ``start_s`` (epoch seconds)."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get(MARK) == os.environ[MARK] and process.pid != os.getpid()
            if is_ours and process.create_time() > start_s - CLOCK_TOLERANCE_S:
                found.append(process)
        except psutil.Error:
            continue  # it has ended, or we may not read it
    return found


def kill_all(processes: list[psutil.Process]) -> None:
    """Kill these processes and wait until they are gone."""
    for process in processes:
        try:
            process.kill()
        except psutil.Error:
            continue  # it has ended
    psutil.wait_procs(processes, timeout=10)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run real jobs first: one that starts last would run alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)


def pytest_collection_finish() -> None:
    freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[object]:
    done = yield
    if nextitem is not None and nextitem.path != item.path:
        freeze()
    return done


def freeze() -> None:
    """Exclude objects that live from file to file, a million of imported modules, from garbage collection:
    scanning them took a fifth of the processor time of some files."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    start_s = time.time()
    try:
        return (yield)
    except BaseException:
        kill_all(processes_since(start_s))
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Close the telemetry that tested code opened: a process has one, and the next test needs another."""
    yield
    if (telemetry := sys.modules.get("slime.observability.telemetry")) is not None:
        telemetry.stop()


def pytest_sessionfinish(session: pytest.Session) -> None:
    kill_all(processes_since(0.0))
