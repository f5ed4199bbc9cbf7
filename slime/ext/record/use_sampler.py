"""How busy GPUs and engines are over a run: samples in a thread, which become metrics of each rollout.

The GPUs of a machine are read through NVML (package nvidia-ml-py) by one process of the job on it; the engines' pages
by the driver, which alone can ask where they are.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import threading
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean
from typing import IO, Any

from slime.ext.record.job_state import Ask, JobState, job_state
from slime.flags.observability import TrackingConfig
from slime.flags.security import Trust
from slime.utils.errors import ConfigError
from slime.utils.files import user_folder

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
CLOSE_S = 10.0
"""For the sample that is being taken; the thread dies with the process."""
GIB = 1024**3
USED_GIB = 1.0
"""The job does not use a GPU with less memory in use."""
ENGINE_GAUGES = {
    "sglang:token_usage": "kv_use",
    "sglang:num_running_reqs": "engine_running",
    "sglang:num_queue_reqs": "engine_waiting",
}
"""Gauge of an engine's page -> metric: the share of the KV cache that holds tokens, requests under way and queued."""


class UseSampler:
    """Takes samples until :meth:`close`; without a GPU and without engines to ask it has no thread.

    Args:
        args: the run's arguments, complete or not.
        nvml: the module ``pynvml``; None: the one of this machine.
        host: in the names of the metrics, those of other machines than the driver's; "" for the driver's.
    """

    def __init__(self, args: Namespace, nvml: Any = None, host: str = "") -> None:
        self._of_host = host and f"/{host}"
        self._secret = Trust.of(args).job_secret
        self._ask: Callable[[], JobState] | None = None
        self._samples: dict[str, list[float]] = defaultdict(list)
        self._guard, self._end = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._claim: IO[str] | None = None
        self._nvml, self._gpus = nvml, list[Any]()
        self._open_gpus(f"gpu-use-{TrackingConfig.of(args).wandb_run_id}")

    def _open_gpus(self, claim: str) -> None:
        """Take the GPUs of this machine, unless it has none or another process of the run has them."""
        try:
            self._nvml = self._nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            gpus = [self._nvml.nvmlDeviceGetHandleByIndex(n) for n in range(self._nvml.nvmlDeviceGetCount())]
        except Exception as error:  # the package, the driver's library or the GPUs are missing; each has its own error
            logger.debug("no use of GPUs is sampled: %s", error)
            return
        try:
            self._claim = open(user_folder() / claim, "w")  # noqa: SIM115  held until close
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (OSError, ConfigError) as error:
            logger.debug("another process samples the GPUs, or nobody can: %s", error)
            return
        self._gpus = gpus
        self._start()

    def offer(self, ask: Ask) -> None:
        """Sample the engines too, which ``ask`` asks for their state."""
        self._ask = partial(ask, job_state)
        self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="use-sampler", daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while not self._end.wait(PERIOD_S):
            self.sample()

    def sample(self) -> None:
        """Take one sample of everything."""
        found = [*self._of_gpus(), *self._of_engines()]
        with self._guard:
            for name, value in found:
                self._samples[name].append(value)

    def _of_gpus(self) -> Iterator[tuple[str, float]]:
        for gpu in self._gpus:
            with contextlib.suppress(self._nvml.NVMLError):  # a GPU cut into instances has no utilization
                used_gib = self._nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB
                if used_gib >= USED_GIB:
                    yield "gpu_memory_gib", used_gib
                    yield "gpu_use", self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100

    def _of_engines(self) -> Iterator[tuple[str, float]]:
        if self._ask is None:
            return
        try:
            pages = self._ask().pages
        except Exception as error:  # the edge of a thread: the manager may be ending
            logger.debug("the use of the engines is not known: %s", error)
            return
        from slime.ext.record.scraping import scraped_families  # with Prometheus' client; only the driver asks

        for family in scraped_families(pages, self._secret):
            if family.name in ENGINE_GAUGES:
                yield from ((ENGINE_GAUGES[family.name], sample.value) for sample in family.samples)

    def metrics(self) -> dict[str, float]:
        """Return mean and maximum of each figure, over GPUs or engines and the time since the last call."""
        with self._guard:
            samples, self._samples = self._samples, defaultdict(list)
        found: dict[str, float] = {}
        for name, values in samples.items():
            name = f"perf/{name}{self._of_host}"
            found |= {f"{name}/mean": fmean(values), f"{name}/max": max(values)}
        return found

    def close(self) -> None:
        """End the thread and give the GPUs back."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        if self._claim is not None:
            self._claim.close()
