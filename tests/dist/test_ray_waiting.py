"""Waits over a real (private) Ray: deadlines, first failures, deaths of actors without running calls."""

import os
import signal
import sys
import time

import pytest
import ray

from slime.observability.pulse import Pulse
from slime.ray import gpus, waiting
from slime.ray.train_actor import Heartbeats
from slime.ray.waiting import WATCH_GROUP, Watched, wait_for, watch
from slime.utils.errors import ConfigError, DeadlineError, EngineDiedError, HangError

pytestmark = pytest.mark.dist

# Ray's workers cannot import a test module by name, so its classes are sent as code.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=6, num_gpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def nothing_watched():
    waiting.forget_all()
    yield
    waiting.forget_all()


class _Worker(Watched):
    def pid(self):
        return os.getpid()

    def echo(self, value, after_s=0.0):
        time.sleep(after_s)
        return value

    def fail(self):
        raise ValueError("the layer count is 3")


Worker = ray.remote(num_cpus=0, concurrency_groups={WATCH_GROUP: 1})(_Worker)


class _Rank(_Worker):
    @ray.method(concurrency_group="pulse")
    def beat(self):
        return Pulse().beat()

    def work(self, *seconds):
        for duration_s in seconds:
            Pulse().mark("micro-batch")
            time.sleep(duration_s)


Rank = ray.remote(num_cpus=0, concurrency_groups={WATCH_GROUP: 1, "pulse": 1})(_Rank)


def test_the_first_failure_ends_the_wait_with_its_own_error():
    slow, broken = Worker.remote(), Worker.remote()
    waiting.name_actor(broken, "actor rank 1")
    start = time.monotonic()
    with pytest.raises(ValueError, match="the layer count is 3") as raised:
        wait_for([slow.echo.remote(1, 300), broken.fail.remote()], what="both", timeout_s=290)
    assert raised.value.__notes__ == ["Raised by actor rank 1 while the job waited for both."]
    assert time.monotonic() - start < 200


def test_the_death_of_a_watched_actor_ends_a_wait_for_another_one():
    victim, other = Worker.remote(), Worker.remote()
    pid = wait_for(victim.pid.remote(), what="the pid", timeout_s=300)
    watch(victim, "actor rank 3")
    waiting_for = other.echo.remote(1, 300)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="actor rank 3 died"):
        wait_for(waiting_for, what="the other", timeout_s=200)


def test_a_call_that_fails_before_the_sentinel_of_its_actor_names_the_actor():
    victim = Worker.remote()
    pid = wait_for(victim.pid.remote(), what="the pid", timeout_s=300)
    watch(victim, "actor rank 2")
    waiting._sentinels.clear()  # as if it had not failed yet
    call = victim.echo.remote(1, 300)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="actor rank 2 died during the echo"):
        wait_for(call, what="the echo", timeout_s=200)


def test_what_fails_to_start_beside_a_wait_ends_the_wait_and_what_starts_does_not():
    worker, other = Worker.remote(), Worker.remote()
    waiting.watch_start(worker.echo.remote(1), "the first engine to start")
    waiting.watch_start(worker.fail.remote(), "the second engine to start")
    with pytest.raises(ValueError, match="the layer count is 3"):
        wait_for(other.echo.remote(1, 300), what="the other", timeout_s=200)
    assert waiting._starting == {}


def test_what_a_forgotten_actor_had_to_start_ends_no_wait():
    dead, other = Worker.remote(), Worker.remote()
    watch(dead, "the manager")
    waiting.watch_start(dead.echo.remote(1, 300), "the engines to start")
    waiting.watch_start(started := other.echo.remote(2), "another engine to start")
    ray.kill(dead)
    with pytest.raises(EngineDiedError, match="the manager died"):
        wait_for(other.echo.remote(1, 300), what="the other", timeout_s=200)
    waiting.forget("the manager")
    assert not waiting._starting.keys() - {started}
    assert wait_for(Worker.remote().echo.remote(3), what="the one in its place", timeout_s=200) == 3


def test_a_passed_deadline_names_the_actor_that_did_not_answer():
    silent, other = Worker.remote(), Worker.remote()
    waiting.name_actor(silent, "the actor of engine 3")
    with pytest.raises(DeadlineError, match=r"1 of 2 calls have not returned \(the actor of engine 3\)"):
        wait_for([silent.echo.remote(1, 300), other.echo.remote(1)], what="two echoes", timeout_s=20)


def test_too_few_gpus_is_an_error_that_says_what_to_change():
    with pytest.raises(ConfigError, match=r"needs 5 GPUs and 6 CPUs; the Ray cluster has 2 GPUs.*--rollout-num-gpus"):
        gpus._reserve(5, timeout_s=1)


def test_reserved_gpus_come_sorted_with_their_physical_indices():
    reserved, nodes = gpus._reserve(2, timeout_s=300)
    assert reserved.gpu_ids == [0, 1] and len(set(nodes)) == 1
    assert sorted(reserved.bundle_indices) == [0, 1]
    ray.util.remove_placement_group(reserved.placement_group)


def ranks_that_answered(hang_timeout_s):
    """Two ranks, their process ids, and their listeners."""
    ranks = {f"actor rank {number}": Rank.remote() for number in range(2)}
    pids = wait_for([rank.pid.remote() for rank in ranks.values()], what="the pids", timeout_s=300)
    heartbeats = Heartbeats(ranks, hang_timeout_s)
    while len(heartbeats._beats) < 2:
        heartbeats.check()
        time.sleep(0.05)
    return list(ranks.values()), pids, heartbeats


def test_a_rank_whose_process_is_stopped_ends_the_wait_for_both():
    ranks, pids, heartbeats = ranks_that_answered(3.0)
    os.kill(pids[1], signal.SIGSTOP)
    try:
        with pytest.raises(HangError, match=r"actor rank 1 has not answered for .* s \(--trainer-hang-timeout-s 3\)"):
            wait_for(
                [rank.echo.remote(1, 300) for rank in ranks], what="training", timeout_s=200,
                meanwhile=heartbeats.check, meanwhile_every_s=0.1,
            )  # fmt: skip
    finally:
        os.kill(pids[1], signal.SIGKILL)


def test_ranks_that_do_not_go_on_end_the_wait_and_the_one_behind_is_named():
    ranks, _, heartbeats = ranks_that_answered(4.0)
    begun = [ranks[0].work.remote(0.1, 0.1, 0.1, 300), ranks[1].work.remote(0.1, 0.1, 300)]  # the other waits for it
    message = "has been in a micro-batch for .* The rank furthest behind is actor rank 1. Slowest first"
    with pytest.raises(HangError, match=message):
        wait_for(begun, what="training", timeout_s=200, meanwhile=heartbeats.check, meanwhile_every_s=0.1)
