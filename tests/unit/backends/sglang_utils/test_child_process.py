from __future__ import annotations

import time

import pytest

from slime.backends.sglang_utils.child_process import ChildProcess


@pytest.fixture(autouse=True)
def logs_in_tmp(monkeypatch, tmp_path):
    monkeypatch.setenv("SLIME_LOG_DIR", str(tmp_path / "logs"))


def wait_for_end(child: ChildProcess) -> str:
    deadline = time.monotonic() + 60
    while (end := child.describe_end()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return end


def test_the_end_of_a_child_is_told_with_its_log(tmp_path):
    # json.tool takes our process id for the name of a file, and says that there is none.
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


def test_stopping_twice_is_no_error():
    child = ChildProcess("http.server", {}, name="x", extra_environment={})
    child.stop()
    child.stop()
    assert not child.is_alive()
