"""The policy for single groups, and the pool between submission and batch, without engines."""

from __future__ import annotations

import asyncio
import io
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slime.rollout import pool as pool_module
from slime.rollout.base_types import Group
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.pool import MAX_NO_PROGRESS, GroupPolicy, GroupPool, InFlightGroup
from slime.rollout.rm_hub.policy import FAILURES
from slime.rollout.run_state import GroupObserver, RunState, use_run
from slime.rollout.waiting import LongWait
from slime.utils.errors import EngineError, HookError
from slime.utils.types import Sample


class Recorder(GroupObserver):
    """An observer that tests read."""

    def __init__(self) -> None:
        self.records: list[tuple[str, Any]] = []

    def finished(self, group: Group) -> None:
        self.records.append(("finished", group[0].index))

    def dropped(self, group: Group, reason: str | None) -> None:
        self.records.append(("dropped", reason))


class State(Namespace):
    """The part of GenerateState that the pool needs."""

    def __init__(self) -> None:
        super().__init__(pendings=set(), remaining_batch_size=0, aborted=False, sampling_params={"top_p": 1.0})

    def start_group(self, call: Any) -> asyncio.Task[Group]:
        task = asyncio.get_running_loop().create_task(call)
        self.pendings.add(task)
        return task


@pytest.fixture(autouse=True)
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    use_run(RunState((recorder,)))
    yield recorder
    use_run(RunState())


def args_with(**flags: Any) -> Namespace:
    return Namespace(**{"n_samples_per_prompt": 1, "rollout_batch_size": 2} | flags)


def make_pool(run_group: Callable[..., Any], *, rollout_id: int = 0, **flags: Any) -> GroupPool:
    return GroupPool(args_with(**flags), State(), run_group, rollout_id=rollout_id)


def finished(index: int = 0, **fields: Any) -> Sample:
    values = {"index": index, "tokens": [1, 2, 3], "response_length": 1, "status": Sample.Status.COMPLETED}
    return Sample(**values | fields)


def drops_odd(args: Any, group: Group, **kwargs: Any) -> DynamicFilterOutput:
    return DynamicFilterOutput(keep=group[0].index % 2 == 0, reason="odd")


# ------------------------------------------------------------------------------------------ policy


def test_what_the_data_source_gives_is_counted_by_how_far_it_is():
    policy = GroupPolicy(args_with())
    partial = Sample(status=Sample.Status.ABORTED, response_length=2)
    for group in ([Sample()], [partial], [finished()]):
        policy.admit(group, 0)
    metrics = policy.take_metrics()
    assert [metrics[f"rollout/groups/{name}"] for name in ("issued", "continued", "reused")] == [3, 1, 1]
    assert policy.take_metrics()["rollout/groups/issued"] == 0


def stuck(sample: Sample, *, no_progress: int = 0) -> InFlightGroup:
    return InFlightGroup([sample], 0, (None, 0), sample.response_length, no_progress)


def test_a_generate_function_that_sets_no_status_is_named():
    policy = GroupPolicy(args_with(custom_generate_function_path="mine.generate"))
    group = [Sample(index=0)]
    before = stuck(group[0])
    for times in range(1, MAX_NO_PROGRESS):
        before.no_progress = policy.count_no_progress(group, before, (None, 0))
        assert before.no_progress == times
    with pytest.raises(HookError, match="--custom-generate-function-path mine.generate .*status pending.* COMPLETED"):
        policy.count_no_progress(group, before, (None, 0))


def test_samples_that_a_generate_function_keeps_aborting_are_left_out():
    policy = GroupPolicy(args_with(custom_generate_function_path="mine.generate"))
    answered, dead = finished(0, reward=1.0), Sample(index=1, status=Sample.Status.ABORTED)
    before = InFlightGroup([answered, dead], 0, (None, 0), 1, MAX_NO_PROGRESS - 1)
    policy.count_no_progress([answered, dead], before, (None, 0))
    assert (answered.status, answered.remove_sample, answered.reward) == (Sample.Status.COMPLETED, False, 1.0)
    assert (dead.status, dead.remove_sample, dead.reward) == (Sample.Status.FAILED, True, 0.0)
    assert "mine.generate returned the sample aborted 3 times" in dead.metadata["reward_error"]
    FAILURES.succeeded()


@pytest.mark.parametrize(
    ("pushes_interrupt", "moment", "is_stuck"), [(False, 0, True), (True, 0, False), (False, 1, False)]
)
def test_a_group_is_stuck_unless_a_push_came_or_where_pushes_come_it_grew(pushes_interrupt, moment, is_stuck):
    policy = GroupPolicy(args_with(), pushes_interrupt=pushes_interrupt)
    sample = Sample(index=5, status=Sample.Status.ABORTED, response_length=2)
    before = stuck(sample, no_progress=MAX_NO_PROGRESS - 1)
    sample.response_length = 4
    if is_stuck:
        with pytest.raises(EngineError, match="sample 5 came back unfinished 3 times"):
            policy.count_no_progress([sample], before, (None, moment))
    else:
        assert policy.count_no_progress([sample], before, (None, moment)) == 0


# ------------------------------------------------------------------------------------------ pool


async def wait_for(pool: GroupPool, num_groups: int) -> None:
    wait = LongWait("rollout 0", num_groups, timeout_s=10, stream=io.StringIO())
    while len(pool.kept) < num_groups:
        await pool.next_finished(wait, "")


def answers(*seconds: float) -> Callable[..., Any]:
    """A ``generate_and_rm_group`` that answers the group of sample k after ``seconds[k]``."""

    async def run_group(args: Any, group: Group, sampling_params: Any, evaluation: bool) -> Group:
        await asyncio.sleep(seconds[group[0].index])
        return [finished(sample.index, weight_versions=sample.weight_versions) for sample in group]

    return run_group


def test_groups_are_taken_in_the_order_of_their_weights_and_then_of_their_end():
    async def main() -> None:
        pool = make_pool(answers(0.04, 0.0, 0.02, 0.0))
        pool.admit(groups := [[Sample(index=k, weight_versions=["7"])] for k in range(4)])
        groups[0][0].weight_versions = ["3"]
        await pool.submit(groups)
        assert pool.num_outstanding == pool.state.remaining_batch_size == 4
        await wait_for(pool, 4)
        assert [group[0].index for group in pool.take(3)] == [0, 1, 3]
        assert pool.num_outstanding == pool.state.remaining_batch_size == 1
        assert not pool.in_flight and not pool.state.pendings

    asyncio.run(main())


def test_every_group_is_kept_or_dropped_and_observers_see_it(recorder):
    async def main() -> None:
        path = f"{__name__}.drops_odd"
        pool = make_pool(answers(0.0, 0.0, 0.0, 0.0), dynamic_sampling_filter_path=path)
        pool.admit(groups := [[Sample(index=k)] for k in range(4)])
        await pool.submit(groups)
        await wait_for(pool, 2)
        batch, metrics = pool.take_batch(lambda count: [])
        assert [group[0].index for group in batch] == [0, 2]
        assert (metrics["rollout/groups/kept"], metrics["rollout/groups/dropped"]) == (2, 2)
        assert metrics["rollout/dynamic_filter/drop_odd"] == 2
        records = recorder.records
        assert sorted(index for kind, index in records if kind == "finished") == [0, 1, 2, 3]
        assert [reason for kind, reason in records if kind == "dropped"] == ["odd", "odd"]

    asyncio.run(main())


def test_a_group_that_was_cut_off_goes_on_and_the_first_rollout_of_its_tokens_is_recorded():
    async def run_group(args: Any, group: Group, sampling_params: Any, evaluation: bool) -> Group:
        [sample] = group
        done = sample.response_length > 0
        return (
            [finished(metadata=sample.metadata)] if done else [Sample(status=Sample.Status.ABORTED, response_length=2)]
        )

    async def main() -> None:
        pool = make_pool(run_group, rollout_id=7)
        await pool.submit([[Sample(index=0)]])
        await wait_for(pool, 1)
        assert pool.kept[0].group[0].metadata == {"start_rollout_id": 7}
        assert pool.policy.take_metrics()["rollout/groups/resubmitted"] == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "says"), [(ValueError("broken"), "broken"), (asyncio.CancelledError(), "was cancelled")]
)
def test_the_error_of_a_group_reaches_whoever_waits(error, says):
    async def run_group(args: Any, group: Group, sampling_params: Any, evaluation: bool) -> Group:
        raise error

    async def main() -> None:
        pool = make_pool(run_group)
        await pool.submit([[Sample(index=0)]])
        with pytest.raises((ValueError, HookError), match=says):
            await wait_for(pool, 1)
        await pool.close()

    asyncio.run(main())


def test_an_abort_leaves_its_groups_to_the_caller(monkeypatch):
    monkeypatch.setattr(pool_module, "POLL_S", 0.01)

    async def main() -> None:
        pool = make_pool(answers(0.0))
        await pool.submit([[Sample(index=0)]])
        pool.state.aborted = True
        [task] = pool.state.pendings
        await task
        assert not pool.kept and pool.state.pendings == {task}
        await pool.close()
        assert not pool.state.pendings

    asyncio.run(main())
