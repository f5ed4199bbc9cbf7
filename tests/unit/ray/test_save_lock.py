"""Two jobs with the same ``--save``, or the same other output that is read back."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from slime.ray.save_lock import LOCK_FILE, SaveLock, lock_folders, lock_outputs
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


def test_a_job_that_holds_the_lock_and_has_not_yet_written_its_name_is_said_to_be_starting(tmp_path):
    with open(tmp_path / LOCK_FILE, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="belongs to a running job: one that is just starting"):
            SaveLock(tmp_path)


def test_the_lock_of_a_killed_job_is_taken_over_and_said(tmp_path, other_job, caplog):
    other_job.send_signal(signal.SIGKILL)
    other_job.wait(timeout=20)
    with caplog.at_level(logging.WARNING):
        lock = SaveLock(tmp_path)
    assert f"a job that ended: host {socket.gethostname()}, pid {other_job.pid}" in caplog.text
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


def test_a_full_disk_is_an_error_of_the_flag(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConfigError, match=r"--save .* cannot be written \(No space left on device\); give another"):
        SaveLock(tmp_path)


def test_each_folder_has_a_lock_inside_another_one_too_and_a_folder_of_two_flags_has_one(tmp_path):
    actor, inside = tmp_path / "run", tmp_path / "run/critic"
    locks = lock_folders({"--save": str(actor), "critic": str(inside), "--other": f"{actor}/", "--none": None}, {})
    assert [lock.path.parent for lock in locks] == [actor, inside]
    with pytest.raises(ConfigError, match=f"critic .*critic belongs to a running job.*pid {os.getpid()}"):
        lock_folders({"--save": str(tmp_path / "other"), "critic": inside}, {})
    for lock in (*locks, SaveLock(tmp_path / "other")):  # the refused job holds no lock
        lock.release()


def test_files_and_folders_that_are_exchanged_whole_are_locked_by_name(tmp_path):
    for name, lock_path in {
        "hf_{rollout_id}": ".hf_{rollout_id}.lock",
        "{rollout_id}/hf": ".{rollout_id}_hf.lock",
        "copy/": ".copy.lock",
        "dump/{rollout_id}.pt": "dump/.{rollout_id}.pt.lock",
    }.items():
        [lock] = lock_folders({}, {"--flag": f"{tmp_path}/{name}"})
        assert lock.path == tmp_path / lock_path and not (tmp_path / "copy").exists()
        [neighbour] = lock_folders({}, {"--flag": f"{tmp_path}/another_{name}"})
        with pytest.raises(ConfigError, match="--mine .*belongs to a running job"):
            lock_folders({}, {"--mine": f"{tmp_path}/./{name}"})
        lock.release()
        neighbour.release()


OUTPUTS = {
    "save": "a", "save_hf": "hf_{rollout_id}",
    "save_debug_rollout_data": "dump/r{rollout_id}.pt", "save_debug_train_data": "dump/t{rollout_id}.pt",
}  # fmt: skip


def job(folder: Path, **outputs: str | None) -> Namespace:
    named = {name: value and f"{folder}/{value}" for name, value in outputs.items()}
    return Namespace(critic_args=None, **named)


@pytest.mark.parametrize("shared", list(OUTPUTS))
def test_two_jobs_that_share_what_either_reads_back_are_not_both_started(tmp_path, shared):
    locks = lock_outputs(job(tmp_path, **OUTPUTS), {})
    other = {name: value and f"other/{value}" for name, value in OUTPUTS.items()}
    assert [lock.release() for lock in lock_outputs(job(tmp_path, **other), {})]
    flag = "--" + shared.replace("_", "-")
    with pytest.raises(ConfigError, match=f"^{flag} .*belongs to a running job"):
        lock_outputs(job(tmp_path, **other | {shared: OUTPUTS[shared]}), {})
    for lock in locks:
        lock.release()
