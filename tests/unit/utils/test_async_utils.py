"""The background loop."""

import asyncio
import threading

import pytest

from slime.flags.cluster import add_cluster_arguments
from slime.flags.config import flag_defaults
from slime.utils.async_utils import DEFAULT_TIMEOUT_S, STALL_TIMEOUT_S, run
from slime.utils.errors import DeadlineError, ProcessError


def test_an_error_of_the_coroutine_reaches_the_caller():
    async def fails():
        raise KeyError("x")

    async def times_out():
        raise TimeoutError("mine")

    with pytest.raises(KeyError):
        run(fails())
    with pytest.raises(TimeoutError, match="mine"):
        run(times_out())


def test_a_coroutine_past_its_deadline_is_cancelled():
    cancelled = threading.Event()

    async def sleeps():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(DeadlineError, match="sleeps did not end within 0 s"):
        run(sleeps(), timeout_s=0.05)
    assert cancelled.wait(5)


def test_waiting_on_the_loop_for_itself_is_refused():
    async def inner():
        return 1

    async def outer():
        return run(inner())

    with pytest.raises(ProcessError, match="await the coroutine instead"):
        run(outer())


def test_flags_and_processes_without_flags_have_the_same_deadlines():
    defaults = flag_defaults(add_cluster_arguments)
    assert defaults["loop_stall_timeout_s"] == STALL_TIMEOUT_S
    assert defaults["rollout_timeout_s"] == DEFAULT_TIMEOUT_S
