"""Two jobs on one ``--save`` folder."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slime.ray.save_lock import LOCK_FILE, SaveLock, lock_folders
from slime.utils.errors import ConfigError

HOLD = """
import sys, time
from slime.ray.save_lock import SaveLock
lock = SaveLock(sys.argv[1])
print("held", flush=True)
time.sleep(120)
"""


@pytest.fixture
def other_job(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait(timeout=20)
    process.stdout.close()


def test_the_second_job_is_refused_and_names_the_first(tmp_path, other_job):
    before = (tmp_path / LOCK_FILE).read_bytes()
    with pytest.raises(ConfigError, match=rf"--save .*{socket.gethostname()}, pid {other_job.pid}, started 2"):
        SaveLock(tmp_path)
    assert (tmp_path / LOCK_FILE).read_bytes() == before


def test_the_lock_of_a_killed_job_is_taken_over_and_said(tmp_path, other_job, caplog):
    other_job.send_signal(signal.SIGKILL)
    other_job.wait(timeout=20)
    with caplog.at_level(logging.WARNING):
        lock = SaveLock(tmp_path)
    assert f"a job that has ended: host {socket.gethostname()}, pid {other_job.pid}" in caplog.text
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    lock.release()


def test_a_job_that_ends_leaves_the_folder_free(tmp_path, caplog):
    folder = tmp_path / "new"
    SaveLock(folder).release()
    assert list(folder.iterdir()) == []
    second = SaveLock(folder)
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        SaveLock(folder)
    second.release()
    assert caplog.text == ""


def test_a_damaged_lock_file_does_not_stop_a_job(tmp_path):
    (tmp_path / LOCK_FILE).write_bytes(b"\xff{")
    SaveLock(tmp_path).release()


def test_a_folder_that_cannot_be_made_is_an_error_of_the_flag(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--save .*file/run cannot be written"):
        SaveLock(Path(tmp_path, "file", "run"))


def test_a_full_disk_is_an_error_of_the_flag(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConfigError, match=r"--save .* cannot be written \(No space left on device\); give another"):
        SaveLock(tmp_path)


def test_the_critic_has_a_lock_where_its_folder_is_another(tmp_path):
    actor, inside, outside = tmp_path / "run", tmp_path / "run/critic", tmp_path / "critic"
    [lock] = lock_folders({"--save": str(actor), "critic": str(inside)})
    lock.release()
    assert lock_folders({"--save": None, "critic": None}) == []
    held = lock_folders({"--save": str(actor), "critic": str(outside)})
    with pytest.raises(ConfigError, match=f"critic .*critic belongs to a job that is running.*pid {os.getpid()}"):
        lock_folders({"--save": str(tmp_path / "other"), "critic": str(outside)})
    for lock in (*held, SaveLock(tmp_path / "other")):  # the refused job holds nothing
        lock.release()
