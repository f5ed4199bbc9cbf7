"""Utilization of GPUs and engines becomes rollout metrics; without a GPU nothing is read."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import pytest

from slime.ext.record.job_state import JobState, PageSource
from slime.ext.record.use_sampler import GIB, UseSampler
from slime.observability.metrics_file import read_records
from tests.ext.record import recording

PAGE = '# TYPE sglang:{name} gauge\nsglang:{name}{{tp_rank="0"}} {value}\n'


class Nvml:
    """Two GPUs of the job, one of another, and one split into MIG instances, with pynvml's functions."""

    NVMLError = KeyError
    use = {0: 20, 1: 60, 2: 90}  # noqa: RUF012
    used_gib = {0: 10.0, 1: 30.0, 2: 0.1, 3: 5.0}  # noqa: RUF012

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=self.used_gib[gpu] * GIB)

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=self.use[gpu])


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("slime.ext.record.use_sampler.user_folder", lambda: tmp_path)


def engines() -> JobState:
    """Two engines that answer, and one that does not."""
    pages = [PAGE.format(name="token_usage", value=0.5), PAGE.format(name="token_usage", value=0.75), ""]
    labels = [{"engine": str(number), "worker_type": "regular"} for number in range(3)]
    return JobState(pages=[PageSource("", label, text) for label, text in zip(labels, pages, strict=True)])


def test_means_and_maxima_are_of_the_time_since_the_last_call():
    sampler = UseSampler(Namespace(wandb_run_id="r"), Nvml())
    sampler.offer(lambda _: engines())
    sampler.sample()
    found = sampler.metrics()
    assert found["perf/gpu_use/mean"] == pytest.approx(0.4) and found["perf/gpu_use/max"] == 0.6
    assert (found["perf/kv_use/mean"], found["perf/kv_use/max"]) == (0.625, 0.75)
    assert found["perf/gpu_memory_gib/max"] == 30.0
    assert sampler.metrics() == {}
    sampler.close()


def test_one_process_of_a_run_on_a_machine_samples_its_gpus():
    first, second, other = (UseSampler(Namespace(wandb_run_id=run), Nvml()) for run in ("r", "r", "s"))
    second.sample()
    other.sample()
    assert second.metrics() == {} and other.metrics()
    first.close()
    third = UseSampler(Namespace(wandb_run_id="r"), Nvml(), "node-1")
    third.sample()
    assert third.metrics()["perf/gpu_use/node-1/max"] == 0.6
    for sampler in (second, other, third):
        sampler.close()


def test_the_record_logs_them_at_the_end_of_a_step(tmp_path):
    args = Namespace(save=str(tmp_path / "run"), wandb_run_id="r", lr=1.0)
    sink = recording.start(args, "driver", primary=True)
    sink.offer(lambda _: engines())
    sink._use.sample()
    recording.span("step", 1.0, 2.0, rollout=3)
    recording.span("step", 2.0, 3.0, rollout=4)
    recording.stop()
    _, logged = read_records(tmp_path / "run/metrics.jsonl")
    assert (logged["rollout/step"], logged["perf/kv_use/max"]) == (3, 0.75)
    assert not [name for name in logged if "gpu" in name]  # this machine has none
