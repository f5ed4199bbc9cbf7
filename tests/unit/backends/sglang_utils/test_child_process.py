"""Child processes: how their end is reported, how process trees end, and where logs are and when they are removed."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from slime.backends.sglang_utils import child_process
from slime.backends.sglang_utils.child_process import ChildProcess, kill_tree
from slime.utils.errors import ConfigError, DeadlineError
from tests.eventually import wait_until

DAY_S = 86400.0
SLEEPER = "import time; time.sleep(600)"
TREE = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); time.sleep(600)"
WATCHED_TREE = (
    "import os, subprocess, sys, time\n"
    "from slime.backends.sglang_utils.child_process import end_with_family\n"
    "end_with_family(int(sys.argv[1]), poll_s=0.1)\n"
    f"subprocess.Popen([sys.executable, '-c', {SLEEPER!r}])\n"
    "time.sleep(600)\n"
)
OWNER = (
    "import os, subprocess, sys, time\n"
    f"subprocess.Popen([sys.executable, '-c', {WATCHED_TREE!r}, str(os.getpid())])\n"
    "time.sleep(600)\n"
)


@pytest.fixture(autouse=True)
def logs_in_tmp(monkeypatch, tmp_path):
    monkeypatch.setenv("SLIME_LOG_DIR", str(tmp_path / "logs"))


def wait_for_end(child: ChildProcess) -> str:
    return wait_until(child.describe_end, "the end of the child") or ""


def test_the_end_of_a_child_is_told_with_its_log(tmp_path):
    # json.tool takes our process id for a file name and reports that there is no such file.
    child = ChildProcess("json.tool", {"a": 1}, name="engine 0 [::1]:1", extra_environment={})
    end = wait_for_end(child)
    assert end.startswith("engine 0 [::1]:1 ended with status 2")
    assert "can't open" in end
    assert child.log_path.parent == tmp_path / "logs"
    assert not child.is_alive()


def test_settings_arrive_and_variables_can_be_taken_away(monkeypatch, tmp_path):
    module = tmp_path / "show_settings.py"
    module.write_text(
        "import os, signal\n"
        "from slime.backends.sglang_utils.child_process import owner_pid, read_settings\n"
        "print(read_settings(), owner_pid() == os.getppid(), os.environ.get('GONE'), os.environ['ADDED'])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setenv("GONE", "here")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = ChildProcess(
        "show_settings", {"port": 1}, name="x", extra_environment={"ADDED": "yes"}, without_variables=("GONE",)
    )
    end = wait_for_end(child)
    assert "x was killed by signal 9" in end
    assert "{'port': 1} True None yes" in end


def wait_for_descendants(pid: int, count: int) -> list[psutil.Process]:
    children = partial(psutil.Process(pid).children, recursive=True)
    wait_until(lambda: len(children()) >= count, f"{count} processes")
    return children()


def test_killing_a_tree_leaves_none_of_it():
    root = subprocess.Popen([sys.executable, "-c", TREE])
    (child,) = wait_for_descendants(root.pid, 1)
    assert kill_tree(root.pid) == []
    assert root.wait(timeout=10) == -signal.SIGKILL
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_what_outlives_its_sigkill_is_named_at_the_deadline(monkeypatch):
    """Like a process stuck in the kernel."""
    child = ChildProcess("json.tool", {"a": 1}, name="engine 0", extra_environment={})
    monkeypatch.setattr(child, "_popen", subprocess.Popen([sys.executable, "-c", SLEEPER]))
    with monkeypatch.context() as deaf:
        deaf.setattr(child_process, "_kill", lambda process: None)
        with pytest.raises(DeadlineError, match=rf"engine 0: processes \[{child.pid}\] .* 0.2 s after SIGKILL"):
            child.stop(timeout_s=0.2)
    assert inspect.signature(child.stop).parameters["timeout_s"].default == 10
    child.stop()
    assert not child.is_alive()


def test_a_tree_ends_when_its_owner_is_killed():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], env=os.environ | {"PYTHONPATH": os.getcwd()})
    tree = wait_for_descendants(owner.pid, 2)
    owner.kill()
    owner.wait(timeout=60)
    _, alive = psutil.wait_procs(tree, timeout=60)
    assert alive == []


@pytest.fixture
def temp(monkeypatch, tmp_path) -> Path:
    monkeypatch.delenv("SLIME_LOG_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    child_process.run_name.cache_clear()
    yield tmp_path
    child_process.run_name.cache_clear()


def make_run(base: Path, name: str, age_s: float) -> Path:
    folder = base / name
    folder.mkdir(parents=True)
    log = folder / "engine.log"
    log.write_text("x")
    for path in (log, folder):
        os.utime(path, (time.time() - age_s,) * 2)
    return folder


def test_a_run_that_still_writes_stays_however_old_it_is(tmp_path):
    old = make_run(tmp_path, "run-old", age_s=10 * DAY_S)
    make_run(tmp_path, "run-new", age_s=DAY_S)
    (old / "engine.log").write_text("still here")
    child_process.remove_old_runs(tmp_path, keep=0)
    assert list(tmp_path.iterdir()) == [old]


def test_a_new_run_makes_its_folder_and_clears_away(temp, monkeypatch):
    base = temp / f"slime-{os.getuid()}"
    for i in range(child_process.KEEP_RUNS + 3):
        make_run(base, f"run-{i:02}", age_s=DAY_S * (i + 1))
    monkeypatch.setenv("SLIME_LOG_RUN", "run-of-the-job")
    log = child_process.new_log_file("engine 0 [::1]:1")
    assert log.parent == base / "run-of-the-job" and log.name.startswith("engine_0____1__1.")
    assert len(list(base.iterdir())) == child_process.KEEP_RUNS
    assert child_process.new_log_file("router").parent == log.parent


def test_a_link_in_the_place_of_a_folder_of_logs_is_not_followed(temp, monkeypatch):
    base = temp / f"slime-{os.getuid()}"
    target = make_run(temp / "other", "run-precious", age_s=30 * DAY_S).parent
    monkeypatch.setenv("SLIME_LOG_RUN", "run-mine")
    for link in (base, base / "run-mine"):
        link.symlink_to(target)
        with pytest.raises(ConfigError, match=f"{link} is a link"):
            child_process.new_log_file("engine")
        link.unlink()
        base.mkdir(mode=0o700, exist_ok=True)
    (base / "run-old").symlink_to(target / "run-precious")  # not followed when old runs are removed
    child_process.remove_old_runs(base, keep=0)
    assert (target / "run-precious/engine.log").read_text() == "x" and len(list(target.iterdir())) == 1


def test_libraries_of_a_child_have_a_temporary_folder_of_this_user_alone(temp, tmp_path, monkeypatch):
    (tmp_path / "show_temp.py").write_text("import tempfile; print(tempfile.gettempdir())")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = ChildProcess("show_temp", {}, name="x", extra_environment={})
    assert f"{temp}/slime-{os.getuid()}" in wait_for_end(child).splitlines()


FAMILY = """
import multiprocessing, os, signal, sys, threading, time
from slime.backends.sglang_utils.child_process import end_with_family, ending_family, owner_pid
end_with_family(owner_pid(), poll_s=0.1)

def die(of):
    print("ValueError: no shape", flush=True)
    if of == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(3)

def control(of):
    end_with_family(os.getppid(), poll_s=0.1)
    multiprocessing.Process(target=die, args=(of,), name="scheduler").start()
    multiprocessing.Process(target=time.sleep, args=(0,), name="helper").start()  # it may end well
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    multiprocessing.Process(target=time.sleep, args=(600,), name="detokenizer").start()
    what = os.environ["WHAT"]
    with ending_family():
        if what == "raise":
            threading.Thread(target=time.sleep, args=(600,)).start()
            raise RuntimeError("Rank 0 scheduler died")
        multiprocessing.Process(target=control, args=(what,), name="controller").start()
        time.sleep(600)
"""


@pytest.mark.parametrize(
    ("what", "ends"),
    [
        ("raise", "ended with status 1\n.*\n--- first error in it ---\nRuntimeError: Rank 0 scheduler died"),
        ("signal", "was killed by signal 9.*scheduler, process .* was killed by signal 9.*ValueError: no shape"),
        ("status", "was killed by signal 9.*scheduler, process .* ended with status 3.*ValueError: no shape"),
    ],
)
def test_a_family_ends_with_any_of_its_processes_whatever_its_parents_wait_for(monkeypatch, tmp_path, what, ends):
    """Like an engine's processes: main, controller, scheduler, and a detokenizer that has no work yet."""
    (tmp_path / "family.py").write_text(FAMILY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = ChildProcess("family", {}, name="engine 0", extra_environment={"WHAT": what})
    family: set[psutil.Process] = set()
    deadline = time.monotonic() + 60
    while (end := child.describe_end()) is None:
        assert time.monotonic() < deadline
        family |= set(child_process._family(child.pid))
        time.sleep(0.02)
    assert re.search(ends, end, re.DOTALL), end
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
