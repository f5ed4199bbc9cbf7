"""Errors of plug-ins name the flag, the path, the sample, and the plug-in's own frames."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from slime.utils import plugins
from slime.utils.async_utils import AsyncLoopThread, StallTimeout
from slime.utils.errors import DeadlineError, HookError
from slime.utils.misc import load_function
from slime.utils.plugins import PluginCall, await_plugin, call_plugin, import_plugin
from tests.contracts.source_tree import REPO

SAMPLE = SimpleNamespace(index=3, group_index=1)
CALL = PluginCall("--custom-rm-path", "mine.grade", SAMPLE)


def write(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> str:
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def grade_badly() -> None:
    raise ValueError("boom")


def leave() -> None:
    sys.exit(0)


def test_an_exception_stays_itself_and_names_the_plug_in_above_its_own_frames():
    with pytest.raises(ValueError, match="boom") as caught:
        call_plugin(CALL, grade_badly)
    (note,) = caught.value.__notes__
    first, *frames = note.splitlines()
    assert first == ("--custom-rm-path mine.grade, called for sample 3 of group 1, raised ValueError: boom")
    assert "in grade_badly" in frames[0] and "slime/utils/plugins.py" not in note
    assert pickle.loads(pickle.dumps(caught.value)).__notes__ == [note], "lost on the way from the manager"


def test_the_innermost_plug_in_is_named_and_slimes_own_functions_are_not():
    outer = PluginCall("--rollout-function-path", "mine.rollout")
    with pytest.raises(ValueError, match="boom") as caught:
        call_plugin(outer, call_plugin, CALL, grade_badly)
    assert len(caught.value.__notes__) == 1 and "--custom-rm-path" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="boom") as caught:
        call_plugin(PluginCall("--rollout-function-path", "slime.rollout.x"), grade_badly)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()])
def test_what_would_end_the_loop_is_an_error_of_the_plug_in(error):
    async def function() -> None:
        raise error

    found: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(await_plugin(CALL, function))
        except HookError as caught:
            found.append(caught)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert f"sample 3 of group 1, raised {type(error).__name__}" in str(found[0]) and "in function" in str(found[0])


def test_a_synchronous_plug_in_cannot_end_the_process():
    with pytest.raises(HookError, match="--custom-rm-path mine.grade.*SystemExit: 0(.|\n)*in leave"):
        call_plugin(CALL, leave)


@pytest.mark.parametrize("source", ["import sys\nsys.exit(0)\n", "raise SystemExit\n", "1 / 0\n"])
def test_a_module_that_exits_or_raises_is_an_error_with_its_frames(tmp_path, monkeypatch, source):
    name = write(tmp_path, monkeypatch, "leaves_at_import", source)
    with pytest.raises(
        HookError, match="--custom-rm-path: leaves_at_import.f: importing leaves_at_import raised"
    ) as error:
        import_plugin(name, f"--custom-rm-path: {name}.f")
    assert f'{name}.py", line ' in str(error.value) and "importlib" not in str(error.value)
    with pytest.raises(HookError, match="importing leaves_at_import raised"):
        load_function(f"{name}.f")


BLOCKS = """
import time
def connect():
    while True:
        try:
            time.sleep(600)
        except Exception:
            pass
connect()
"""


@pytest.mark.parametrize("where", ["main thread", "another thread"])
def test_a_module_that_blocks_has_a_deadline_and_names_where_it_is(tmp_path, monkeypatch, caplog, where):
    monkeypatch.setattr(plugins, "IMPORT_WARNING_S", 0.2)
    name = write(tmp_path, monkeypatch, f"blocks_in_{where.split()[0]}", BLOCKS)
    began = time.monotonic()
    found: list[HookError] = []

    def work() -> None:
        with pytest.raises(HookError) as error:
            import_plugin(name, f"--custom-rm-path: {name}.f", timeout_s=0.6)
        found.append(error.value)

    if where == "main thread":
        work()
    else:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
    assert time.monotonic() - began < 10
    message = str(found[0])
    assert message.startswith(f"--custom-rm-path: {name}.f: importing {name} did not end within 0.6 s")
    assert "in connect" in message and "time.sleep(600)" in message
    assert f"importing {name} has taken" in caplog.text


# The background loop


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> AsyncLoopThread:
    monkeypatch.setattr(StallTimeout, "seconds", 1.5)
    return AsyncLoopThread()


def test_what_blocks_the_loop_is_named_and_ends_the_wait(loop, caplog):
    release = threading.Event()

    async def blocking_grader() -> None:
        release.wait(60)

    async def main() -> None:
        await asyncio.gather(await_plugin(CALL, blocking_grader), asyncio.sleep(60))

    began = time.monotonic()
    try:
        with pytest.raises(
            DeadlineError, match="blocked for . s by --custom-rm-path mine.grade, called for sample 3"
        ) as error:
            loop.run(main())
    finally:
        release.set()
    assert time.monotonic() - began < 10
    assert "in blocking_grader" in str(error.value) and "--loop-stall-timeout-s" in str(error.value)
    assert "call_plugin" not in str(error.value) and "asyncio/" not in str(error.value)
    assert "has been blocked" in caplog.text, "no warning before the end"


def test_a_task_that_exits_is_reported_and_the_loop_lives_on(loop):
    async def background() -> None:
        sys.exit(0)

    async def main() -> None:
        asyncio.create_task(background())
        await asyncio.sleep(60)

    async def awaits_it() -> None:
        await asyncio.create_task(background())

    async def four() -> int:
        return 4

    for function in (main, awaits_it):
        with pytest.raises(HookError, match="raised SystemExit: 0(.|\n)*in background"):
            loop.run(function())
    assert loop.run(four()) == 4


HOLDS_THE_LOCK = """
import asyncio, re
from slime.utils import async_utils
async_utils.StallTimeout.seconds, async_utils.INTERPRETER_MARGIN_S = 0.5, 0.5
async def endless_pattern():
    re.match("(a+)+$", "a" * 64 + "b")
async_utils.run(endless_pattern())
"""


def test_code_that_holds_the_interpreters_lock_ends_the_process_with_its_frames():
    words = [sys.executable, "-c", HOLDS_THE_LOCK]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=REPO)
    assert done.returncode == 1, done.stderr
    assert "Timeout" in done.stderr and "in endless_pattern" in done.stderr
