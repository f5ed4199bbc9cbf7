"""Ending a rollout early: stop the engines, then take back what was under way.

The engines are asked directly, because routers do not pass ``/abort_request`` on; the router only names them.  One
request may still be on its way when the first abort arrives, so the abort is repeated until nothing is pending.
"""

from __future__ import annotations

import asyncio
import logging
import time
from argparse import Namespace
from typing import Any

from slime.rollout.control_client import control_get, control_post
from slime.rollout.groups import Group, is_finished, leaf_samples
from slime.rollout.replaceable import entry_points
from slime.rollout.waiting import DEFAULT_ROLLOUT_TIMEOUT_S, DeadlineExceeded, LongWait
from slime.utils.errors import DeadlineError, ProcessError

logger = logging.getLogger(__name__)

FIRST_REPEAT_S = 0.1
MAX_REPEAT_S = 3.0
IDLE_WAIT_S = 60.0
"""How long engines may stay busy after our last request has come back, before we go on without them."""


async def abort(args: Namespace, rollout_id: int, *, timeout_s: float | None = None) -> list[Group]:
    """Stop every pending group of the rollout and wait until all of them have come back.

    Returns:
        With ``--partial-rollout`` the groups in submission order, unfinished and just finished ones alike, their
        samples stamped with ``metadata["start_rollout_id"]``; otherwise nothing.

    Raises:
        DeadlineError: something was still pending after ``timeout_s`` (``--rollout-timeout-s`` by default).
    """
    state = entry_points().GenerateState(args)
    state.aborted = True
    tasks = state.in_submission_order(state.pendings)
    if timeout_s is None:
        timeout_s = getattr(args, "rollout_timeout_s", DEFAULT_ROLLOUT_TIMEOUT_S)
    wait = LongWait(f"rollout {rollout_id}: abort", len(tasks), timeout_s=timeout_s)
    repeat_s = FIRST_REPEAT_S
    try:
        while True:
            await abort_engines(args)
            pending = [task for task in tasks if not task.done()]
            if not pending:
                break
            await wait.all_done(pending, lambda: (sum(task.done() for task in tasks), "groups back"), wake_s=repeat_s)
            repeat_s = min(2 * repeat_s, MAX_REPEAT_S)
        groups = [task.result() for task in tasks]
        await _wait_until_idle(args, repeat_s=repeat_s)
    except DeadlineExceeded:
        num_done = sum(task.done() for task in tasks)
        raise await timeout_error(args, f"The abort of rollout {rollout_id}", wait, num_done, len(tasks)) from None
    finally:
        wait.close()
    state.pendings.difference_update(tasks)
    if not args.partial_rollout:
        return []
    for group in groups:
        stamp_start(group, rollout_id)
    return groups


def stamp_start(group: Group, rollout_id: int) -> None:
    """Note in which rollout a sample's first tokens were drawn, unless it is noted already."""
    for sample in leaf_samples(group):
        if sample.response_length > 0:
            sample.metadata.setdefault("start_rollout_id", rollout_id)


async def worker_urls(args: Namespace) -> list[str]:
    """The engines that the router knows."""
    answer = await control_get(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers")
    return [worker["url"] for worker in answer.get("workers", [])]


async def abort_engines(args: Namespace) -> None:
    """Ask every engine to end all its requests; one that does not answer is logged and left to its monitor."""

    async def abort_one(url: str) -> None:
        try:
            await control_post(f"{url}/abort_request", {"abort_all": True})
        except ProcessError as error:
            logger.warning("Engine %s did not take the abort: %s", url, error)

    await asyncio.gather(*(abort_one(url) for url in await worker_urls(args)))


async def engine_loads(args: Namespace) -> dict[str, int | None]:
    """Requests that each engine holds; None where it does not say."""

    async def load_of(url: str) -> int | None:
        try:
            return count_requests(await control_get(f"{url}/v1/loads?include=core"))
        except (ProcessError, KeyError, TypeError, ValueError) as error:
            logger.debug("Engine %s does not tell its load: %s", url, error)
            return None

    urls = await worker_urls(args)
    return dict(zip(urls, await asyncio.gather(*(load_of(url) for url in urls)), strict=True))


def count_requests(loads: Any) -> int:
    """Requests in an answer of ``/v1/loads``: one entry per data-parallel rank, in a list or under ``loads``.

    Raises:
        ValueError: an entry has none of the known counters.
    """
    if isinstance(loads, dict):
        loads = loads["loads"] if "loads" in loads else [loads]
    total = 0
    for entry in loads:
        for name in ("num_reqs", "num_total_reqs", "total_reqs"):
            if name in entry:
                total += entry[name]
                break
        else:
            if "num_running_reqs" not in entry:
                raise ValueError(f"no request count in {entry}")
            total += entry["num_running_reqs"] + entry.get("num_waiting_reqs", 0)
    return total


async def _wait_until_idle(args: Namespace, *, repeat_s: float) -> None:
    """Repeat the abort until the engines are idle: requests of custom functions may have outlived their callers."""
    give_up_s = time.monotonic() + IDLE_WAIT_S
    while busy := {url: load for url, load in (await engine_loads(args)).items() if load}:
        if time.monotonic() > give_up_s:
            logger.warning("Engines still busy %.0f s after the abort (requests by engine): %s", IDLE_WAIT_S, busy)
            return
        await asyncio.sleep(repeat_s)
        repeat_s = min(2 * repeat_s, MAX_REPEAT_S)
        await abort_engines(args)


async def timeout_error(args: Namespace, what: str, wait: LongWait, num_done: int, num_wanted: int) -> DeadlineError:
    """The error for a wait whose deadline passed: how far it came, and which engines still hold requests."""
    state = entry_points().GenerateState(args)
    pending = sum(not task.done() for task in state.pendings)
    try:
        loads = await asyncio.wait_for(engine_loads(args), timeout=10)
        busy = ", ".join(f"{url} ({'unknown' if n is None else n})" for url, n in loads.items() if n != 0)
    except (ProcessError, TimeoutError) as error:
        busy = f"unknown, the router did not answer ({error})"
    return DeadlineError(
        f"{what} did not end within {wait.timeout_s:.0f} s: {num_done} of {num_wanted} are done, {pending} groups "
        f"pending; engines that hold requests: {busy or 'none, so a custom generate or reward function is stuck'}. "
        "Look at the logs of these engines, or raise --rollout-timeout-s."
    )


def count_unfinished(groups: list[Group]) -> int:
    """How many of the groups must go on in a later rollout."""
    return sum(not is_finished(group) for group in groups)
