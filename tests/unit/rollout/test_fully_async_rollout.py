"""Generation across rollouts against a scripted engine: the staleness bound, back-pressure, nothing lost."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest

from slime.rollout import fully_async_rollout, pool, sglang_rollout
from slime.rollout.base_types import leaf_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import AsyncRolloutWorker, generate_rollout_fully_async
from slime.rollout.run_state import RunState, use_run
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.rollout.sglang_rollout import generate, generate_rollout
from slime.utils.async_utils import run
from slime.utils.errors import ConfigError, DeadlineError, HookError
from slime.utils.http_utils import close_http_client, init_http_client
from slime.utils.types import Sample
from tests.eventually import wait_until
from tests.scripted_engine.script import Request, Script
from tests.scripted_engine.server import ScriptedEngine
from tests.unit.rollout.fake_cluster import clear_process, make_args, write_prompts

TEST_TIMEOUT_S = 60.0


async def call_engine(url: str, payload: dict[str, Any]) -> None:
    async with aiohttp.ClientSession() as session, session.post(url, json=payload) as answer:
        answer.raise_for_status()


class Job:
    """An engine, a data source, and the two training loops around the rollout function."""

    def __init__(self, engine: ScriptedEngine, args: Any) -> None:
        self.engine = engine
        self.args = args
        self.source = RolloutDataSourceWithBuffer(args)
        self.trained: list[tuple[int, int, list[Sample]]] = []
        """(rollout, the trainer's version, group)."""
        self.metrics: list[dict[str, Any]] = []
        self._thread = ThreadPoolExecutor(1)

    def generate(self, rollout_id: int) -> Any:
        set_current_rollout_id(rollout_id)
        return generate_rollout_fully_async(self.args, rollout_id, self.source)

    def push(self) -> None:
        """The trainer's push between two rollouts."""
        version = str(int(self.engine.weight_version) + 1)
        run(call_engine(f"{self.engine.url}/pause_generation", {}))
        run(call_engine(f"{self.engine.url}/update_weight_version", {"new_version": version}))
        run(call_engine(f"{self.engine.url}/continue_generation", {}))

    def train(self, rollout_id: int, output: Any) -> None:
        self.metrics.append(output.metrics)
        self.trained += [(rollout_id, int(self.engine.weight_version), group) for group in output.samples]

    def run_ahead(self, num_rollouts: int, *, train_s: float = 0.0, first: int = 0) -> None:
        """The order of train_async.py."""
        ahead: Future[Any] = self._thread.submit(self.generate, first)
        for rollout_id in range(first, num_rollouts):
            output = ahead.result(TEST_TIMEOUT_S)
            if rollout_id + 1 < num_rollouts:
                ahead = self._thread.submit(self.generate, rollout_id + 1)
            time.sleep(train_s)
            self.train(rollout_id, output)
            if (rollout_id + 1) % self.args.update_weights_interval == 0:
                if rollout_id + 1 < num_rollouts:
                    ahead.result(TEST_TIMEOUT_S)
                self.push()

    def run_in_turn(self, num_rollouts: int) -> None:
        """The order of train.py."""
        for rollout_id in range(num_rollouts):
            self.train(rollout_id, self.generate(rollout_id))
            self.push()

    def staleness(self) -> list[int]:
        """For each trained group: the trainer's version minus the oldest version that generated a token."""
        return [
            version - min(v for sample in leaf_samples(group) for v in versions_of_tokens(sample))
            for _, version, group in self.trained
        ]

    def trained_names(self) -> Counter[int]:
        return Counter(group[0].group_index for _, _, group in self.trained)


def versions_of_tokens(sample: Sample) -> list[int]:
    """Versions of the calls that generated tokens, which the scripted log-probs encode."""
    return [int(-log_prob) for log_prob in sample.rollout_log_probs]


StartJob = Callable[..., Job]


@pytest.fixture
def start_job(tmp_path, monkeypatch) -> Iterator[StartJob]:
    engines: list[ScriptedEngine] = []
    clear_process(monkeypatch)
    for module in (pool, fully_async_rollout):
        monkeypatch.setattr(module, "POLL_S", 0.05)
    set_current_rollout_id(None)

    def start(num_prompts: int = 64, script: Script | None = None, **flags: Any) -> Job:
        engine = ScriptedEngine(script or Script(length=(1, 8), seconds_per_token=0.002))
        engine.weight_version = "1"
        engine.script.log_prob = lambda token, position: -float(engine.weight_version)
        engine.start()
        engines.append(engine)
        prompts = [f"prompt {k}" for k in range(num_prompts)]
        values = {"max_staleness": None, "update_weights_interval": 1, "num_rollout": None}
        values |= {"rollout_max_response_len": 1000, "rollout_timeout_s": TEST_TIMEOUT_S}
        prompt_data = write_prompts(tmp_path / "prompts.jsonl", prompts)
        args = make_args(engine.port, prompt_data=prompt_data, **(values | flags))
        init_http_client(args)
        return Job(engine, args)

    yield start
    for worker in fully_async_rollout._WORKERS:
        run(worker.stop())
    fully_async_rollout._WORKERS.clear()
    run(close_http_client())
    use_run(RunState())
    for engine in engines:
        engine.stop()


def straggling(request: Request) -> int:
    """One prompt in five takes far longer than the others."""
    return 150 if int(request.text.split()[-1]) % 5 == 0 else 3


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize("interval", [1, 2])
def test_no_trained_token_is_older_than_the_bound(start_job, max_staleness, interval):
    script = Script(length=straggling, seconds_per_token=0.001)
    job = start_job(200, script, max_staleness=max_staleness, update_weights_interval=interval, rollout_batch_size=4)
    job.run_ahead(8)
    assert max(job.staleness()) <= max_staleness
    assert set(job.trained_names().values()) == {1} and len(job.trained) == 8 * 4
    assert [m["rollout/staleness/groups_regenerated"] for m in job.metrics] == [0] * 8


def test_the_producer_stops_when_groups_could_only_be_trained_too_late(start_job):
    job = start_job(200, Script(length=2), max_staleness=3, rollout_batch_size=4)
    job.generate(0)
    time.sleep(0.3)
    # Rollout 0 is out; rollouts 1 to 3 can each train four groups generated by version 1, with two samples per group.
    assert len({p["rid"] if "rid" in p else k for k, p in enumerate(job.engine.payloads)}) <= 4 * 4 * 2
    worker = fully_async_rollout._WORKERS[0]
    assert worker.get_queue_size() + len(worker.pool.in_flight) <= 3 * 4
    job.generate(1)
    time.sleep(0.3)
    assert len(job.engine.payloads) <= 4 * 4 * 2, "no push came, so nothing may be added"
    job.push()
    job.generate(2)
    time.sleep(0.3)
    assert len(job.engine.payloads) == 5 * 4 * 2, "the push made room for one batch"


def test_a_push_keeps_the_tokens_drawn_so_far_and_the_group_goes_on_with_the_new_weights(start_job):
    script = Script(length=40, hold_after=5, holds=4)
    job = start_job(script=script, max_staleness=2, sglang_server_concurrency=4)
    first = ThreadPoolExecutor(1).submit(job.generate, 0)
    wait_until(lambda: len(job.engine.payloads) >= 4, "four requests")
    job.push()
    output = first.result(TEST_TIMEOUT_S)
    samples = [sample for group in output.samples for sample in group]
    assert len(samples) == 4
    for sample in samples:
        request = Request(0, {}, tuple(sample.tokens[: len(sample.tokens) - 40]), 0, 0, 40, "")
        assert sample.tokens[-40:] == script.tokens_of(request, 0, 40), "as if it had not been interrupted"
        assert len(sample.rollout_log_probs) == 40 and sample.status == Sample.Status.COMPLETED
    assert {tuple(sample.weight_versions) for sample in samples} >= {("1", "2")}
    assert samples[0].metadata["start_rollout_id"] == 0
    assert output.metrics["rollout/groups/interrupted"] >= 2
    earlier = [len(p["input_ids"]) - len("prompt 0") for p in job.engine.payloads[4:8]]
    assert earlier[:2] == [5, 5], "the continuation sends what was drawn"


def test_groups_of_an_earlier_job_that_are_too_old_are_drawn_again(start_job, caplog):
    one_group = {"sglang_server_concurrency": 2}  # the next group cannot finish before the regenerated one
    job = start_job(script=Script(length=4), max_staleness=1, **one_group)
    job.engine.weight_version = "9"
    job.source.add_samples([finished_group(job, "5"), finished_group(job, "8")])
    output = job.generate(0)
    again, kept = output.samples
    assert [sample.weight_versions for sample in again] == [["9"], ["9"]]
    assert [sample.weight_versions for sample in kept] == [["8"], ["8"]]
    assert output.metrics["rollout/staleness/groups_regenerated"] == 1
    assert output.metrics["rollout/staleness/tokens_discarded"] == 6
    assert "--max-staleness" in caplog.text


@pytest.mark.parametrize("policy", ["regenerate", "mask"])
def test_the_bound_holds_for_surplus_and_partial_groups_of_the_default_rollout(start_job, policy):
    flags = {"partial_rollout": True, "max_staleness": 1, "stale_group_policy": policy, "rollout_batch_size": 3}
    job = start_job(script=Script(length=6), over_sampling_batch_size=3, **flags)
    job.engine.weight_version = "9"
    partial = finished_group(job, "6")
    for sample in partial:
        sample.tokens = sample.tokens[:-3] + job.engine.script.tokens_of(_request(sample), 0, 3)
        sample.status, sample.reward = Sample.Status.ABORTED, None
    job.source.add_samples([partial, finished_group(job, "5"), finished_group(job, "8")])
    output = generate_rollout(job.args, 0, job.source)
    versions = [[sample.weight_versions for sample in group] for group in output.samples]
    removed = [[sample.remove_sample for sample in group] for group in output.samples]
    if policy == "regenerate":
        assert versions == [[["9"]] * 2, [["9"]] * 2, [["8"]] * 2] and not any(map(any, removed))
        assert output.metrics["rollout/staleness/groups_regenerated"] == 2
    else:
        assert versions == [[["6", "9"]] * 2, [["5"]] * 2, [["8"]] * 2]
        assert removed == [[True] * 2, [True] * 2, [False] * 2]
        assert output.metrics["rollout/staleness/groups_masked"] == 2
    assert output.metrics["rollout/staleness/max"] == 1.0


def _request(sample: Sample) -> Request:
    return Request(0, {}, tuple(map(ord, sample.prompt)), 0, 0, 99, "")


def finished_group(job: Job, version: str) -> list[Sample]:
    [group] = job.source.get_samples(1)
    for sample in group:
        sample.append_response_tokens(
            tokens=[300_000, 300_001, 300_002],
            log_probs=[-1.0] * 3,
            text="abc",
            meta_info={"finish_reason": {"type": "stop"}, "weight_version": version},
        )
        sample.tokens = [*map(ord, sample.prompt), *sample.tokens]
        sample.reward = 1.0
    return group


def test_staleness_zero_needs_the_loop_that_pushes_before_it_generates(start_job):
    job = start_job(script=Script(length=2), max_staleness=0)
    job.run_in_turn(4)
    assert job.staleness() == [0] * len(job.trained)

    other = start_job(script=Script(length=2), max_staleness=0)
    set_current_rollout_id(None)
    with pytest.raises(ConfigError, match="--max-staleness 1 or more"):
        other.run_ahead(3)


def test_every_group_issued_is_trained_or_still_there(start_job):
    job = start_job(300, Script(length=straggling, seconds_per_token=0.001), max_staleness=2, rollout_batch_size=4)
    job.run_ahead(7)
    worker = fully_async_rollout._WORKERS[0]
    held = [item.group for item in [*worker.pool.in_flight.values(), *worker.pool.kept]] + list(worker.spare)
    names = job.trained_names() + Counter(group[0].group_index for group in held)
    assert names == Counter(range(job.source.sample_group_index))


def test_an_error_in_a_reward_ends_the_rollout_that_waits(start_job):
    job = start_job(script=Script(length=2), custom_rm_path=f"{__name__}.broken_reward")
    with pytest.raises(HookError, match="no reward today"):
        job.generate(0)


async def broken_reward(args: Any, sample: Any, **kwargs: Any) -> float:
    raise HookError("no reward today")


def test_a_rollout_that_takes_too_long_says_which_engine_holds_requests(start_job):
    job = start_job(script=Script(length=5, hold_after=2), rollout_timeout_s=0.3)
    with pytest.raises(DeadlineError, match=r"0 of 2 are done.*--rollout-timeout-s") as caught:
        job.generate(0)
    assert job.engine.url in str(caught.value)


def test_an_execution_may_fan_out_and_begins_again_after_a_push(start_job):
    script = Script(length=30, hold_after=5, holds=4)
    job = start_job(
        script=script,
        max_staleness=2,
        sglang_server_concurrency=4,
        custom_generate_function_path=f"{__name__}.two_parts",
        custom_rm_path=f"{__name__}.any_reward",
    )
    first = ThreadPoolExecutor(1).submit(job.generate, 0)
    wait_until(lambda: len(job.engine.payloads) >= 4, "four requests")
    job.push()
    output = first.result(TEST_TIMEOUT_S)
    for group in output.samples:
        for entry in group:
            assert [part.status for part in entry] == [Sample.Status.COMPLETED] * 2
            assert [part.weight_versions for part in entry] == [["2"], ["2"]]
    assert output.metrics["rollout/groups/interrupted"] == 2


async def two_parts(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """The same answer twice, as two samples of one execution."""
    other = copy.deepcopy(sample)
    sample.rollout_id = other.rollout_id = sample.index
    return [await generate(args, part, dict(sampling_params)) for part in (sample, other)]


async def any_reward(args: Any, sample: Any, **kwargs: Any) -> Any:
    return [1.0] * len(sample) if isinstance(sample, list) else 1.0


class BareSource(RolloutDataSourceWithBuffer):
    """A data source that omits metadata."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = super().get_samples(num_samples)
        leave_no_metadata(None, groups)
        return groups


def leave_no_metadata(args: Any, samples: Any, *rest: Any, **facts: Any) -> Any:
    for sample in leaf_samples(samples):
        sample.metadata = None
    return samples if isinstance(samples, Sample) else True


def test_a_place_that_becomes_free_while_groups_are_started_is_taken_at_once(start_job, monkeypatch):
    job = start_job(rollout_batch_size=2, n_samples_per_prompt=1)
    monkeypatch.setattr(pool, "STARTED_AT_ONCE", 1)

    async def answer(args: Any, group: list[Sample], **options: Any) -> list[Sample]:
        if group[0].group_index == 1:
            await asyncio.sleep(TEST_TIMEOUT_S)
        group[0].status = Sample.Status.COMPLETED
        return group

    monkeypatch.setattr(sglang_rollout, "generate_and_rm_group", answer)

    async def main() -> list[int | None]:
        worker = AsyncRolloutWorker(job.args, job.source, concurrency=2)
        async with asyncio.timeout(TEST_TIMEOUT_S / 4):
            output = await worker.collect(0)
        await worker.stop()
        return [group[0].group_index for group in output.samples]

    assert run(main()) == [0, 2]
