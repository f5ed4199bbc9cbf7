"""The driver's Prometheus page: logged metrics, and the engines' state as the manager reports it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from slime.ext.record import prometheus_page
from slime.ext.record.flags import derive_expert_load
from slime.ext.record.prometheus_page import PrometheusSink
from slime.observability import telemetry
from slime.observability.metrics_file import append_record
from slime.ray import train_loop
from slime.ray.engines.lifecycle import EngineState
from slime.ray.train_loop import TrainJob
from slime.ray.waiting import sigterm
from slime.utils.net import get_free_port
from tests.ext.record.test_prometheus_page import fetch, samples


class Job(TrainJob):
    """The part of a driver that a sink uses, with its own manager."""

    def __init__(self, save: Path) -> None:
        names = [Namespace(name="aime")]
        self.args = Namespace(save=str(save), prometheus_port=get_free_port(33000), eval_datasets=names)
        fleet = Namespace(servers=[], groups=[Namespace(states=[EngineState.SERVING] * 4, num_evictions=1)])
        self.manager = Namespace(run=Namespace(remote=lambda function: function(fleet)))


def test_the_driver_serves_what_the_run_logs_and_what_the_manager_knows(monkeypatch, tmp_path):
    limits: list[float] = []
    monkeypatch.setattr(train_loop.ray, "get", lambda state, *, timeout: (limits.append(timeout), state)[1])
    monkeypatch.setattr(sigterm(), "check", lambda: pytest.fail("the page takes a notice that is for the loop"))
    monkeypatch.setattr(prometheus_page, "listen_address", lambda: "127.0.0.1")
    job = Job(tmp_path)
    telemetry.start(job.args, "driver", (PrometheusSink,), primary=True)
    telemetry.offer(lambda function: train_loop.ask_engines(job.manager, function))
    (*_, sink) = telemetry._Stream.sinks
    assert isinstance(sink, PrometheusSink) and sink.page is not None
    try:
        append_record(tmp_path / "metrics.jsonl", {"rollout/step": 3, "rollout/raw_reward": 0.5, "eval/aime": 0.25})
        found = samples(fetch(sink.page))
    finally:
        telemetry.stop()
    assert found["slime_rollout_raw_reward"] == 0.5 and found['slime_eval_reward{dataset="aime"}'] == 0.25
    assert found['slime_engines{state="serving"}'] == 4 and found["slime_engine_evictions_total"] == 1
    assert limits == [5.0] and sink.page is None


@pytest.mark.parametrize("prometheus_port", [None, 9000])
@pytest.mark.parametrize(("given", "is_logged"), [(None, None), (True, True), (False, False)])
def test_the_load_of_experts_is_logged_for_prometheus_unless_that_is_turned_off(prometheus_port, given, is_logged):
    args = Namespace(prometheus_port=prometheus_port, log_expert_load=given)
    derive_expert_load(args)
    assert args.log_expert_load is (prometheus_port is not None if is_logged is None else is_logged)
