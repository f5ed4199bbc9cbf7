"""Every wait on the rollout side has a deadline, or a reason to have none."""

from __future__ import annotations

import ast

import pytest

from tests.contracts.waits import rollout_side_files, waits_in, waits_of

UNTIMED = {
    "slime.agent.sandbox.runner._relay: asyncio.gather": "the sandbox's end cancels it",
    "slime.ext.agent.taskset_worker.Worker.serve: asyncio.Event().wait": "until main() cancels it, at the input's end",
    "slime.ext.mcp.server.Session._hold: self._leaving.wait": "a session lasts until close() sets it",
    "slime.utils.aiohttp_threaded.run_app_in_thread.serve: finished.wait": "a server serves until stop() sets it",
    "slime.observability.trace_utils.trace_span.__enter__: _open_spans.get": "a ContextVar, no queue",
    "slime.observability.trace_utils.trace_event: _open_spans.get": "a ContextVar, no queue",
    "slime.ray.distributed_post.DistributedPost.__call__: poster.post.remote": "http_utils.post waits for it, timed",
    "slime.ray.engines.monitor.HealthMonitor._loop: self._running.wait": "paused until resume() or stop()",
    "slime.rollout.engine_client.abort_engines: asyncio.gather": "every request has CONTROL_TIMEOUT_S",
    "slime.rollout.engine_client.engine_loads: asyncio.gather": "every request has CONTROL_TIMEOUT_S",
    "slime.rollout.fully_async_rollout.AsyncRolloutWorker._produce: asyncio.timeout": "collect() is the timed side",
    "slime.rollout.fully_async_rollout.AsyncRolloutWorker._produce: self.pool.room.wait": "collect() is timed",
    "slime.rollout.pool.result_of: task.result": "called when the task is done",
    "slime.rollout.sglang_rollout.eval_rollout: asyncio.gather": "every data set has a LongWait",
    "slime.rollout.sglang_rollout.generate_and_rm_group: asyncio.gather": "rewards have --rm-timeout-s",
    "slime.rollout.sglang_rollout._reward: asyncio.gather": "rewards have --rm-timeout-s",
    "slime.rollout.sglang_rollout._run_entries: asyncio.gather": "requests are timed, and so is the rollout",
    "slime.ext.environments.multi_turn._Player.observe: asyncio.gather": "every call has --turn-timeout-s",
    "slime.ext.training_api.command.serve: ended.wait": "a server serves until somebody stops it, or its backend ends",
    "slime.ext.training_api.queues.ModelQueue._take: self._arrived.wait": "timed while one waits for another",
    "slime.ext.training_api.queues.PassQueue.run: asyncio.gather": "each call of serve() is timed",
    "slime.ext.training_api.engine_sampling.EngineSampling.sample: asyncio.gather": "posts have --rollout-timeout-s",
    "slime.ext.training_api.queues.PassQueue.serve: self._is_filled.wait": "serves until stop() cancels it",
    "slime.ext.training_api.samplers.Samplers._next_release: self._released.wait": "both callers are timed",
    "slime.utils.misc.exec_command: subprocess.run": "a whole training run may be the command",
    "slime.ext.fast_push.channel.WeightChannel.wait: work.wait": "called when the broadcast is done",
    "slime.ext.recovery.supervisor._run: child.wait": "for a driver, as long as it runs",
    "slime.ext.ledger.segments.JournalWriter._serve: self._wake.wait": "a daemon thread; put and close wake it",
    "slime.ext.distill.engine_teacher.reward_func: asyncio.gather": "every request has REQUEST_TIMEOUT_S",
    "slime.rollout.rm_hub.batched_async_rm: asyncio.gather": "every grading has --rm-timeout-s",
    "slime.rollout.engine_client.engine_versions: asyncio.gather": "every request has CONTROL_TIMEOUT_S",
    "slime_plugins.rollout_buffer.generator.base_generator.Worker.run: asyncio.gather": "every post is timed",
    "slime_plugins.rollout_buffer.generator.base_generator.run_rollout: worker.join": "the service ends the generator",
}
"""Waits without a deadline, and why that is right."""


def test_no_wait_is_without_a_deadline_but_those_with_a_reason():
    waits = [wait for path in rollout_side_files() for wait in waits_of(path)]
    untimed = {wait.place: f"{wait.place} (line {wait.line})" for wait in waits if not wait.is_timed}
    assert sorted(untimed[place] for place in untimed.keys() - UNTIMED.keys()) == []
    assert sorted(UNTIMED.keys() - untimed.keys()) == [], "no longer there: take these out of the list"


@pytest.mark.parametrize(
    "line",
    [
        "ray.get(ref)",
        "ray.wait([ref], timeout=None)",
        "aiohttp.ClientSession()",
        "requests.post(url, json={})",
        "httpx.AsyncClient()",
        "queue.get()",
        "self._event.wait()",
        "thread.join()",
        "process.communicate()",
        "lock.acquire()",
        "subprocess.run(words, check=True)",
        "urllib.request.urlopen(url)",
        "future.result()",
    ],
)
def test_the_finder_knows_a_wait_without_a_deadline(line):
    (wait,) = waits_in(ast.parse(f"def f():\n    {line}\n"), "m")
    assert not wait.is_timed and wait.place.startswith("m.f: ")


@pytest.mark.parametrize(
    "line",
    [
        "await asyncio.gather(*tasks)",
        "await asyncio.wait(tasks)",
        "await event.wait()",
        "await actor.call.remote(1)",
    ],
)
def test_the_finder_knows_a_wait_of_a_coroutine(line):
    (wait,) = waits_in(ast.parse(f"async def f():\n    {line}\n"), "m")
    assert not wait.is_timed
    (limit, inside) = waits_in(ast.parse(f"async def f():\n  async with asyncio.timeout(3):\n    {line}\n"), "m")
    assert limit.is_timed and inside.is_timed


@pytest.mark.parametrize(
    "line",
    ["ray.get(ref, timeout=5)", "thread.join(3)", "process.wait(timeout=9)", "queue.get(timeout=1)", "event.wait(2)"],
)
def test_the_finder_knows_a_wait_with_a_deadline(line):
    assert all(wait.is_timed for wait in waits_in(ast.parse(f"def f():\n    {line}\n"), "m"))
