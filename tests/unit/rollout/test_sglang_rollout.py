"""The rollout loop against a fake router and engines over HTTP: what it requests, keeps, drops and returns."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slime.rollout import engine_client, sglang_rollout
from slime.rollout.base_types import leaf_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.errors import DataError, DeadlineError, EngineError, HookError
from slime.utils.http_utils import close_http_client, init_http_client
from slime.utils.types import Sample
from tests.unit.rollout import fake_cluster
from tests.unit.rollout.fake_cluster import FakeCluster, Plan, clear_process, make_args, prompt_of, write_prompts

HOOKS = fake_cluster.__name__
NONZERO_STD = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


class Job:
    """A data source and a cluster, and rollouts over them."""

    def __init__(self, cluster: FakeCluster, args: Any) -> None:
        self.cluster = cluster
        self.args = args
        self.source = RolloutDataSourceWithBuffer(args)

    def rollout(self, rollout_id: int = 0) -> Any:
        self.output = generate_rollout(self.args, rollout_id, self.source)
        return self.output

    def count(self, name: str) -> int:
        return self.output.metrics[f"rollout/groups/{name}"]

    @property
    def prompts_asked(self) -> list[str]:
        return sorted(prompt_of(body) for body in self.cluster.requests)


StartJob = Callable[..., Job]


@pytest.fixture
def start_job(tmp_path, monkeypatch) -> Iterator[StartJob]:
    clusters: list[FakeCluster] = []
    clear_process(monkeypatch)
    monkeypatch.setattr(http_utils, "RETRY_WAIT_S", 0.01)

    def start(prompts: list[str], plans: dict[str, Plan] | None = None, *, num_engines: int = 1, **flags: Any) -> Job:
        async def make() -> FakeCluster:
            return await FakeCluster(plans, num_engines=num_engines).start()

        clusters.append(run(make()))
        prompt_data = write_prompts(tmp_path / "prompts.jsonl", prompts)
        args = make_args(clusters[-1].port, prompt_data=prompt_data, **flags)
        init_http_client(args)
        return Job(clusters[-1], args)

    yield start
    run(close_http_client())
    for cluster in clusters:
        run(cluster.stop())


def prompts_of(groups: list[Any]) -> list[str]:
    return [next(leaf_samples(group)).prompt for group in groups]


# ------------------------------------------------------------------------------------------ the plain rollout


def test_a_rollout_gives_every_prompt_once_in_order_with_tokens_and_rewards(start_job):
    job = start_job(["a", "b", "c"], rollout_batch_size=3, over_sampling_batch_size=3)
    groups = job.rollout().samples
    assert prompts_of(groups) == ["a", "b", "c"]
    assert job.prompts_asked == ["a", "a", "b", "b", "c", "c"]
    sample = groups[1][0]
    assert sample.tokens == [ord("b"), 1000, 1001, 1002, 1003]
    assert sample.response == "<1000><1001><1002><1003>" and sample.response_length == 4
    assert sample.rollout_log_probs == [-0.5] * 4 and sample.loss_mask == [1] * 4
    assert sample.status is Sample.Status.COMPLETED and sample.weight_versions == ["1"]
    assert [s.reward for s in groups[1]] == [0.0, 1.0]
    assert job.source.get_buffer_length() == 0


def test_the_request_has_the_flags_as_sampling_parameters(start_job):
    job = start_job(["a", "b"], rollout_stop=["x"], rollout_max_response_len=3)
    groups = job.rollout().samples
    # Requests sent together arrive in any order.
    assert min(job.cluster.requests, key=lambda request: request["input_ids"]) == {
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 3,
            "stop": ["x"],
            "stop_token_ids": None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        },
        "return_logprob": True,
        "input_ids": [ord("a")],
    }
    assert {s.status for s in leaf_samples(groups)} == {Sample.Status.TRUNCATED}


def test_prompts_come_in_waves_until_the_target_is_met(start_job):
    job = start_job(list("abcdefgh"), rollout_batch_size=5, over_sampling_batch_size=2)
    assert len(job.rollout().samples) == 5
    assert job.count("issued") == 6 and job.source.sample_offset == 6
    assert len(job.cluster.requests) == 12


# ------------------------------------------------------------------------------------------ early stop and partial


def test_the_rest_is_aborted_and_discarded_once_the_target_is_met(start_job):
    held = {prompt: Plan(hold_after=2) for prompt in "bd"}
    job = start_job(list("abcd"), held, over_sampling_batch_size=4)
    assert prompts_of(job.rollout().samples) == ["a", "c"]
    assert len(job.cluster.requests) == 8 and job.cluster.num_aborts >= 1
    assert job.source.get_buffer_length() == 0
    assert (job.count("kept"), job.count("discarded"), job.count("returned")) == (2, 2, 0)


def test_a_partial_rollout_hands_the_aborted_groups_back_with_their_tokens(start_job):
    held = {prompt: Plan(hold_after=2) for prompt in "bd"}
    job = start_job(list("abcd"), held, over_sampling_batch_size=4, partial_rollout=True)
    job.rollout(7)
    assert prompts_of(job.source.buffer) == ["b", "d"]
    sample = job.source.buffer[0][0]
    assert sample.status is Sample.Status.ABORTED and sample.reward is None
    assert sample.tokens == [ord("b"), 1000, 1001] and sample.rollout_log_probs == [-0.5, -0.5]
    assert sample.metadata["start_rollout_id"] == 7
    assert (job.count("returned_unfinished"), job.count("returned_finished")) == (2, 0)


@pytest.mark.parametrize(("mask_flag", "mask"), [(False, [1, 1, 1, 1]), (True, [0, 0, 1, 1])])
def test_the_next_rollout_continues_a_partial_response_where_it_stopped(start_job, mask_flag, mask):
    held = {prompt: Plan(hold_after=2, holds=2) for prompt in "bd"}
    job = start_job(
        list("abcd"),
        held,
        over_sampling_batch_size=4,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=mask_flag,
    )
    job.rollout(0)
    job.cluster.requests.clear()
    job.cluster.weight_version = "2"
    job.args.over_sampling_batch_size = 2
    groups = job.rollout(1).samples
    assert prompts_of(groups) == ["b", "d"]
    assert job.prompts_asked == ["b", "b", "d", "d"]
    assert job.cluster.requests[0]["input_ids"][-2:] == [1000, 1001]
    assert {body["sampling_params"]["max_new_tokens"] for body in job.cluster.requests} == {6}
    sample = groups[0][0]
    assert sample.tokens == [ord("b"), 1000, 1001, 1002, 1003] and sample.status is Sample.Status.COMPLETED
    assert sample.response == "<1000><1001><1002><1003>"
    assert sample.loss_mask == mask and sample.rollout_log_probs == [-0.5] * 4
    assert sample.weight_versions == ["1", "2"] and sample.metadata["start_rollout_id"] == 0
    assert job.count("continued") == 2 and job.source.get_buffer_length() == 0


def test_finished_surplus_is_handed_back_and_taken_later_without_a_request(start_job):
    job = start_job(
        list("abcd"), over_sampling_batch_size=4, partial_rollout=True, mask_offpolicy_in_partial_rollout=True
    )
    first = prompts_of(job.rollout(0).samples)
    assert job.count("returned_finished") == 2 and len(job.cluster.requests) == 8
    job.args.over_sampling_batch_size = 2
    groups = job.rollout(1).samples
    assert sorted(first + prompts_of(groups)) == list("abcd")
    assert len(job.cluster.requests) == 8, "surplus is not generated again"
    assert all(s.loss_mask == [1] * 4 and s.reward is not None for s in leaf_samples(groups)), "nor masked"
    assert {s.metadata["start_rollout_id"] for s in leaf_samples(groups)} == {0}
    assert job.count("reused") == 2


def test_every_issued_group_is_kept_dropped_or_returned_over_many_rollouts(start_job):
    prompts = [f"dull{i}" if i % 3 == 0 else f"p{i}" for i in range(40)]
    plans = {prompt: Plan(hold_after=1, holds=1) for i, prompt in enumerate(prompts) if i % 4 == 1}
    job = start_job(
        prompts,
        plans,
        rollout_batch_size=3,
        over_sampling_batch_size=5,
        partial_rollout=True,
        dynamic_sampling_filter_path=NONZERO_STD,
    )
    job.cluster.patience_s = 0.2  # a held group may be needed to reach the target
    trained: Counter[str] = Counter()
    for rollout_id in range(6):
        trained.update(prompts_of(job.rollout(rollout_id).samples))
    issued = set(prompts[: job.source.sample_offset])
    waiting = set(prompts_of(job.source.buffer))
    assert len(trained) == 18 and set(trained.values()) == {1}, "none is trained twice"
    assert not waiting & set(trained)
    assert all(prompt.startswith("dull") for prompt in issued - waiting - set(trained)), "only dull ones are gone"


def test_a_request_that_reaches_the_engine_after_the_first_abort_is_aborted_too(start_job):
    late = {"b": Plan(hold_after=2, wait_in_router=True)}
    job = start_job(["a", "b"], late, rollout_batch_size=1, partial_rollout=True)
    assert prompts_of(job.rollout().samples) == ["a"]
    assert job.source.buffer[0][0].tokens == [ord("b"), 1000, 1001]
    assert job.cluster.num_aborts >= 2


def test_groups_that_do_not_come_back_from_an_abort_end_the_run_and_a_deaf_engine_is_named(
    start_job, monkeypatch, caplog
):
    asked: list[str] = []

    async def refuse(url: str, payload: Any) -> None:
        asked.append(url)
        raise EngineError("no answer within 120 s")

    monkeypatch.setattr(engine_client, "control_post", refuse)
    monkeypatch.setattr(sglang_rollout, "IDLE_WAIT_S", 2.0)
    job = start_job(["a", "b"], {"b": Plan(hold_after=2)}, rollout_batch_size=1, rollout_timeout_s=1.0)
    with pytest.raises(DeadlineError, match=r"The abort of rollout 0 .*1 groups pending.*--rollout-timeout-s"):
        job.rollout()
    assert len(asked) >= 2 and f"Engine {job.cluster.engine_urls[0]} did not take the abort" in caplog.text


def test_the_abort_reaches_the_engines_when_every_connection_is_busy(start_job):
    held = {"b": Plan(hold_after=2)}
    job = start_job(["a", "b"], held, rollout_batch_size=1, sglang_server_concurrency=2, partial_rollout=True)
    assert prompts_of(job.rollout().samples) == ["a"]
    assert len(job.source.buffer) == 1


# ------------------------------------------------------------------------------------------ filter


def test_the_filter_with_fallback_keeps_dull_groups_rather_than_fetch_more(start_job):
    job = start_job(["dull1", "dull2"], dynamic_sampling_filter_path=NONZERO_STD + "_with_fallback")
    assert len(job.rollout().samples) == 2
    assert job.count("issued") == 2


def test_hooks_at_the_end_see_the_kept_and_all_groups(start_job):
    job = start_job(
        ["dull1", "a", "b"],
        rollout_batch_size=2,
        over_sampling_batch_size=3,
        dynamic_sampling_filter_path=NONZERO_STD,
        rollout_sample_filter_path=f"{HOOKS}.remember_groups",
        rollout_all_samples_process_path=f"{HOOKS}.remember_groups",
    )
    job.rollout()
    assert fake_cluster.CALLS == [[2, 4], [0, 2, 4]]


# ------------------------------------------------------------------------------------------ rewards


def test_group_rm_grades_each_group_once_after_all_its_samples(start_job):
    job = start_job(["a", "b"], group_rm=True)
    groups = job.rollout().samples
    assert sorted(fake_cluster.CALLS) == [[0, 1], [2, 3]]
    assert [s.reward for s in leaf_samples(groups)] == [0.0, 1.0, 0.0, 1.0]


# ------------------------------------------------------------------------------------------ fan-out


def test_a_fanned_out_execution_passes_filter_rewards_and_order(start_job):
    job = start_job(
        ["dull1", "a", "b"],
        rollout_batch_size=2,
        over_sampling_batch_size=3,
        custom_generate_function_path=f"{HOOKS}.fan_out",
        dynamic_sampling_filter_path=NONZERO_STD,
    )
    groups = job.rollout().samples
    assert prompts_of(groups) == ["a", "b"]
    assert [[len(entry) for entry in group] for group in groups] == [[2, 2], [2, 2]]
    assert [s.reward for s in leaf_samples(groups[0])] == [0.0, 0.0, 1.0, 1.0]
    assert {len(call) for call in fake_cluster.CALLS} == {2}, "one call per execution"


def test_a_plain_reward_of_one_sample_gets_those_of_a_fan_out_one_by_one_in_a_thread(start_job):
    job = start_job(
        ["a", "b"],
        rollout_batch_size=2,
        custom_generate_function_path=f"{HOOKS}.fan_out",
        custom_rm_path=f"{HOOKS}.plain_reward",
    )
    groups = job.rollout().samples
    assert [s.reward for s in leaf_samples(groups[0])] == [0.0, 0.0, 1.0, 1.0]
    assert len(fake_cluster.CALLS) == 8
    assert {thread for _, thread in fake_cluster.CALLS} == {"grader"}


def test_an_interrupted_fan_out_starts_again_from_its_prompt(start_job):
    held = {"b": Plan(hold_after=2, holds=2)}
    job = start_job(
        ["a", "b"],
        held,
        rollout_batch_size=1,
        partial_rollout=True,
        custom_generate_function_path=f"{HOOKS}.fan_out",
    )
    job.rollout(0)
    assert [s.tokens for s in job.source.buffer[0]] == [[], []]
    assert {s.status for s in job.source.buffer[0]} == {Sample.Status.ABORTED}
    job.args.over_sampling_batch_size = 1
    groups = job.rollout(1).samples
    assert [[len(entry) for entry in group] for group in groups] == [[2, 2]]
    assert {s.response_length for s in leaf_samples(groups)} == {4}


# ------------------------------------------------------------------------------------------ routing and seeds


@pytest.mark.parametrize("policy", ["consistent_hashing", "manual"])
def test_the_routing_key_is_the_session_and_stays_with_the_sample(start_job, policy):
    held = {"a": Plan(hold_after=1, holds=2)}
    job = start_job(["b", "a"], held, rollout_batch_size=1, partial_rollout=True, router_policy=policy)
    job.rollout(0)
    sessions = {s.session_id for s in job.source.buffer[0]}
    assert len(sessions) == 2
    job.cluster.headers.clear()
    job.args.over_sampling_batch_size = 1
    job.rollout(1)
    assert {headers["X-SMG-Routing-Key"] for headers in job.cluster.headers} == sessions


@pytest.mark.parametrize("policy", [None, "round_robin", "consistent_hashing"])
def test_requests_whose_fields_the_router_would_lose_go_straight_to_the_workers(start_job, policy):
    job = start_job(["a", "b"], num_engines=2, rollout_top_p=0.9, router_policy=policy)
    job.rollout()
    assert job.cluster.through_router == [False] * 4
    assert job.cluster.requests[0]["sampling_params"]["custom_params"] == {"return_top_p_token_ids": True}
    if policy != "consistent_hashing":
        assert Counter(job.cluster.served_by) == {0: 2, 1: 2}


def test_a_prefill_worker_cannot_be_asked_directly(start_job):
    job = start_job(["a", "b"], num_engines=2, rollout_top_p=0.9)
    job.cluster.worker_types = ["prefill", "decode"]
    with pytest.raises(EngineError, match="prefill or decode"):
        job.rollout()


# ------------------------------------------------------------------------------------------ failures


def test_an_engine_that_stays_dead_ends_the_rollout_with_an_error(start_job, monkeypatch):
    monkeypatch.setattr(http_utils, "RETRY_WAIT_S", 0.0)
    job = start_job(["a", "b"], {"a": Plan(statuses=[500] * 1000), "b": Plan(hold_after=1)})
    with pytest.raises(EngineError, match="failed 61 time"):
        job.rollout()
    assert GenerateState(job.args).pendings == set() and not GenerateState(job.args).aborted


def test_a_group_that_the_engine_breaks_off_is_continued(start_job):
    job = start_job(["a", "b"], {"a": Plan(breaks=1)})
    groups = job.rollout().samples
    assert prompts_of(groups) == ["a", "b"]
    assert {s.response_length for s in leaf_samples(groups)} == {4}
    assert job.count("resubmitted") == 1


def test_the_deadline_names_what_is_done_and_which_engine_is_busy(start_job):
    job = start_job(["a", "b"], {"b": Plan(hold_after=1)}, rollout_timeout_s=1.5)
    with pytest.raises(DeadlineError) as caught:
        job.rollout()
    message = str(caught.value)
    assert "1 of 2 are done, 1 groups pending" in message
    assert f"{job.cluster.engine_urls[0]} (2)" in message and "--rollout-timeout-s" in message


def drop_all(args: Any, group: Any) -> bool:
    return False


def drop_slowly(args: Any, group: Any) -> bool:
    time.sleep(1.1)
    return False


def hook_slowly(args: Any, sample: Sample) -> None:
    time.sleep(1.1)


async def wait_for_ever(args: Any, sample: Sample, *rest: Any) -> Any:
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("flag", "plug_in", "says"),
    [
        ("dynamic_sampling_filter_path", drop_all, "dropped by --dynamic-sampling-filter-path {}; .*: none"),
        ("dynamic_sampling_filter_path", drop_slowly, "blocked the loop, .*'--dynamic-sampling-filter-path {}'"),
        ("rollout_sample_hook_path", hook_slowly, "blocked the loop, .*'--rollout-sample-hook-path {}'"),
        ("rollout_sample_hook_path", wait_for_ever, "under way, .*'--rollout-sample-hook-path {}': 4"),
        ("custom_generate_function_path", wait_for_ever, "under way, .*'--custom-generate-function-path {}': 4"),
        ("custom_rm_path", wait_for_ever, "under way, .*'--custom-rm-path {}': 4"),
    ],
)
def test_the_deadline_names_the_plug_in_that_took_the_time(start_job, flag, plug_in, says):
    path = f"{__name__}.{plug_in.__name__}"
    job = start_job(["a", "b"], rollout_timeout_s=1.5, rm_timeout_s=60.0, **{flag: path})
    with pytest.raises(DeadlineError, match=says.format(path)):
        job.rollout()


def test_a_group_of_the_wrong_size_is_refused(start_job):
    job = start_job(["a", "b"])
    job.source.get_samples = lambda num: [[Sample(prompt="a")]]  # type: ignore[method-assign]
    with pytest.raises(DataError, match="n-samples-per-prompt is 2"):
        job.rollout()


@pytest.mark.parametrize(
    ("given", "says"), [([1.0], "1 rewards"), (1.0, "1.0"), (None, "None"), ({"a": 1.0, "b": 2.0}, "{'a': 1.0, ")]
)
def test_a_reward_function_that_forgets_samples_is_refused(start_job, monkeypatch, given, says):
    async def one_reward(args, samples):
        return given

    monkeypatch.setattr(fake_cluster, "position_reward", one_reward)
    sglang_rollout.load_function.cache_clear()
    job = start_job(["a", "b"], group_rm=True)
    try:
        with pytest.raises(HookError, match=f"gave {re.escape(says)}.* ?for 2 samples"):
            job.rollout()
    finally:
        sglang_rollout.load_function.cache_clear()


# ------------------------------------------------------------------------------------------ replaceable names


@pytest.mark.parametrize("name", ["generate", "generate_and_rm", "generate_and_rm_group"])
def test_a_replaced_name_is_used_at_the_next_call(start_job, monkeypatch, name):
    job = start_job(["a", "b"])
    original = getattr(sglang_rollout, name)
    seen = []

    async def replacement(*args, **kwargs):
        seen.append(name)
        return await original(*args, **kwargs)

    monkeypatch.setattr(sglang_rollout, name, replacement)
    job.rollout()
    assert len(seen) == (2 if name == "generate_and_rm_group" else 4)


def test_engines_that_stay_busy_after_the_abort_hold_the_rollout_up_no_longer_than_a_minute(monkeypatch, caplog):
    aborts: list[Any] = []

    async def busy(config: Any) -> dict[str, int]:
        return {"http://engine": 2}

    async def abort(config: Any) -> None:
        aborts.append(config)

    assert sglang_rollout.IDLE_WAIT_S == 60
    monkeypatch.setattr(sglang_rollout, "IDLE_WAIT_S", 0.2)
    monkeypatch.setattr(sglang_rollout, "engine_loads", busy)
    monkeypatch.setattr(sglang_rollout, "abort_engines", abort)
    run(sglang_rollout._wait_until_idle(None, repeat_s=0.02), timeout_s=20)
    assert aborts and "Engines still busy" in caplog.text and "http://engine" in caplog.text
