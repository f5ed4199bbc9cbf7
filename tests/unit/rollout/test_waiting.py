"""The progress line and the deadline, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace

from slime.rollout import waiting
from slime.rollout.waiting import LongWait, cancel_all


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_wait_writes_a_line_every_interval():
    stream, clock = io.StringIO(), Clock()
    wait = LongWait("rollout 3", 8, timeout_s=60.0, stream=stream, clock=clock)
    for seconds in (15, 20, 30):
        clock.now_s = seconds
        wait.show(4, "2 in flight")
    assert stream.getvalue().splitlines() == [
        "rollout 3 [############............] 4/8, 15 s, about 15 s left, 2 in flight",
        "rollout 3 [############............] 4/8, 30 s, about 30 s left, 2 in flight",
    ]


def test_on_a_terminal_the_line_is_redrawn_in_place():
    stream, clock = Terminal(), Clock()
    wait = LongWait("eval", 2, timeout_s=60.0, stream=stream, clock=clock)
    for done in (0, 1, 2):
        clock.now_s += 1
        wait.show(done)
    wait.close()
    assert stream.getvalue().count("\r") == 3 and stream.getvalue().count("\n") == 1


def test_a_wait_moves_a_bar_on_the_driver_s_terminal_in_place_of_lines(monkeypatch):
    seen: list[object] = []
    bar = SimpleNamespace(update=seen.append, close=lambda: seen.append("closed"))
    monkeypatch.setattr(LongWait, "make_bar", lambda *what: seen.append(what) or bar)
    stream, clock = io.StringIO(), Clock()
    short, wait = (LongWait(title, 8, stream=stream, clock=clock) for title in ("eval", "rollout 3"))
    short.close()
    for done in (1, 2, 6):
        clock.now_s += 1
        wait.show(done)
    wait.close()
    assert (seen, stream.getvalue()) == ([("rollout 3", 8), 1, 1, 4, "closed"], "")


def test_a_task_that_swallows_its_cancellation_is_named_and_left(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "CANCEL_WAIT_S", 0.05)

    async def deaf(release: asyncio.Event) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        release = asyncio.Event()
        tasks = [asyncio.create_task(deaf(release)), asyncio.create_task(asyncio.sleep(60))]
        await asyncio.sleep(0)
        async with asyncio.timeout(15):
            await cancel_all(tasks)
        assert not tasks[0].done() and tasks[1].cancelled()
        release.set()
        await tasks[0]

    asyncio.run(main())
    assert "1 tasks have not ended" in caplog.text and "deaf" in caplog.text
