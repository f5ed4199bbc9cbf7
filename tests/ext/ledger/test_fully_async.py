"""Rollouts against a scripted engine, run like the manager and the training loops, with a ledger and crashes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from slime.ext.ledger.ledger import Ledger
from slime.rollout import fully_async_rollout, rm_hub
from slime.rollout.base_types import leaf_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.rm_hub import policy
from slime.rollout.run_state import CheckpointPosition, RunState, use_run
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils.async_utils import run
from slime.utils.errors import GraderError
from tests.scripted_engine.script import Script
from tests.scripted_engine.server import ScriptedEngine
from tests.unit.rollout import test_fully_async_rollout
from tests.unit.rollout.test_fully_async_rollout import (
    TEST_TIMEOUT_S,
    BareSource,
    Job,
    straggling,
)

start_job = test_fully_async_rollout.start_job  # the fixture


class LedgeredJob(Job):
    """One process of a job with a ledger: the work of the rollout manager and of train_async.py's loop."""

    def __init__(self, engine: ScriptedEngine, args: Any, start_rollout_id: int) -> None:
        super().__init__(engine, args)
        self.ledger = Ledger(args, self.source)
        self.position = CheckpointPosition(self.source, [self.ledger])
        use_run(RunState((self.ledger,)))
        self.start_rollout_id = start_rollout_id
        if start_rollout_id:
            self.source.load(start_rollout_id - 1)
        self.ledger.start(start_rollout_id)

    def generate(self, rollout_id: int) -> Any:
        set_current_rollout_id(rollout_id)
        self.position.begin(rollout_id)
        return self.ledger.make_samples(
            rollout_id, lambda: generate_rollout_fully_async(self.args, rollout_id, self.source)
        )

    def save(self, rollout_id: int) -> None:
        self.position.save(rollout_id)  # the next rollout has begun, or is about to
        self.ledger.published(rollout_id)

    def run(self, stop: int, *, save_after: int | None = None) -> None:
        """Run rollouts up to ``stop``, always with the next one begun; then the process is gone."""
        ahead = self._thread.submit(self.generate, self.start_rollout_id)
        for rollout_id in range(self.start_rollout_id, stop):
            output = ahead.result(TEST_TIMEOUT_S)
            ahead = self._thread.submit(self.generate, rollout_id + 1)
            self.train(rollout_id, output)
            self.ledger.trained(rollout_id)
            if rollout_id == save_after:
                self.save(rollout_id)
            ahead.result(TEST_TIMEOUT_S)
            self.push()
        for worker in fully_async_rollout._WORKERS:
            run(worker.stop())
        fully_async_rollout._WORKERS.clear()
        GenerateState.clear_instances()
        self.ledger.close()


def graded(samples: Any) -> list[tuple[int, float | None, bool]]:
    return [(s.index, s.reward, "reward_error" in s.metadata) for s in leaf_samples(samples)]


def test_after_a_crash_a_mended_grader_grades_what_the_broken_one_could_not(start_job, tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "FAILURES", policy.FailureCount())
    monkeypatch.setitem(rm_hub._GRADERS, "f1", lambda sample: 1 / 0)
    flags = {"custom_rm_path": None, "rm_type": "f1", "rm_max_failures": 4, "partial_rollout": True}
    flags |= {"n_samples_per_prompt": 1, "sglang_server_concurrency": 1}
    job = start_job(script=Script(length=2), save=str(tmp_path / "save"), load=str(tmp_path / "save"), **flags)

    def rollout(job: LedgeredJob, rollout_id: int) -> list[tuple[int, float | None, bool]]:
        set_current_rollout_id(rollout_id)
        job.position.begin(rollout_id)
        make = job.ledger.make_samples
        return graded(make(rollout_id, lambda: generate_rollout(job.args, rollout_id, job.source)).samples)

    first = LedgeredJob(job.engine, job.args, 0)
    assert rollout(first, 0) == [(0, 0.0, True), (1, 0.0, True)]
    with pytest.raises(GraderError):
        rollout(first, 1)
    first.ledger.close()

    monkeypatch.setitem(rm_hub._GRADERS, "f1", lambda sample: 0.5)
    num_drawn = len(job.engine.payloads)
    for _ in range(3):  # each process takes over the earlier processes' records
        GenerateState.clear_instances()
        again = LedgeredJob(job.engine, job.args, 0)
        assert rollout(again, 0) == [(0, 0.0, True), (1, 0.0, True)], "it was recorded as a batch"
        assert rollout(again, 1) == [(2, 0.5, False), (3, 0.5, False)]
        again.ledger.close()
    assert len(job.engine.payloads) == num_drawn


@pytest.mark.parametrize("save_after", [None, 0, 2])
@pytest.mark.parametrize("policy", ["regenerate", "mask"])
def test_after_a_crash_no_group_is_lost_and_none_trained_twice(start_job, tmp_path, save_after, policy):
    flags = {"max_staleness": 2, "stale_group_policy": policy, "rollout_batch_size": 4, "num_rollout": 9}
    flags |= {"rollout_function_path": f"{fully_async_rollout.__name__}.generate_rollout_fully_async"}
    flags |= {"save": str(tmp_path / "save"), "load": str(tmp_path / "save"), "start_rollout_id": None}
    job = start_job(100, Script(length=straggling, seconds_per_token=0.001), **flags)
    first = LedgeredJob(job.engine, job.args, 0)
    first.run(5, save_after=save_after)

    begin = 0 if save_after is None else save_after + 1
    set_current_rollout_id(None)
    job.engine.weight_version = str(begin + 1)
    second = LedgeredJob(job.engine, job.args, begin)
    second.run(8)
    lineage = [item for item in first.trained if item[0] < begin] + second.trained
    names = Counter(group[0].group_index for _, _, group in lineage)
    assert len(lineage) == 8 * 4 and set(names.values()) == {1}
    assert set(names) <= set(range(9 * 4)), "nothing was skipped: nine rollouts take the first 36 groups"


@pytest.mark.parametrize("source", [RolloutDataSourceWithBuffer, BareSource])
def test_samples_without_metadata_are_recorded_too(start_job, tmp_path, monkeypatch, source):
    monkeypatch.setattr(test_fully_async_rollout, "RolloutDataSourceWithBuffer", source)
    hook = {"rollout_sample_hook_path": [f"{test_fully_async_rollout.__name__}.leave_no_metadata"]}
    job = start_job(script=Script(length=2), save=str(tmp_path / "save"), **hook)
    job = LedgeredJob(job.engine, job.args, 0)
    make = job.ledger.make_samples
    for rollout_id in range(2):
        output = make(rollout_id, lambda: generate_rollout(job.args, rollout_id, job.source))  # noqa: B023
        assert all(sample.metadata is not None for sample in leaf_samples(output.samples))
    job.ledger.close()
