"""Folders of this user alone in a folder that everybody writes to."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slime.utils import private_folder
from slime.utils.errors import ConfigError

STRANGER = 54321
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def temp(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    return tmp_path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_all_processes_of_a_user_share_one_folder_that_nobody_else_enters(temp):
    mine = temp / f"slime-{os.getuid()}"
    assert private_folder.user_folder() == private_folder.user_folder() == mine and mode_of(mine) == 0o700
    mine.chmod(0o775)  # as earlier versions made it
    assert mode_of(private_folder.user_folder()) == 0o700


def test_a_link_or_a_file_in_the_place_of_the_folder_is_refused_and_left_alone(temp):
    target, mine = temp / "target", temp / f"slime-{os.getuid()}"
    target.mkdir(mode=0o755)
    for put in (lambda: mine.symlink_to(target), lambda: mine.symlink_to(temp / "nothing"), mine.touch):
        put()
        with pytest.raises(ConfigError, match=r"slime-\d+ is (a link|no folder).*TMPDIR"):
            private_folder.user_folder()
        mine.unlink()
    assert mode_of(target) == 0o755 and not (temp / "nothing").exists()


@AS_ROOT
def test_a_folder_of_another_user_is_refused_whatever_its_mode(temp):
    mine = temp / f"slime-{os.getuid()}"
    mine.mkdir(mode=0o700)
    os.chown(mine, STRANGER, STRANGER)
    with pytest.raises(ConfigError, match=r"belongs to user 54321"):
        private_folder.user_folder()


def test_the_owner_is_compared_with_the_user(tmp_path):
    found = tmp_path.lstat()
    assert private_folder.problem_of(found) == ""
    assert private_folder.problem_of(found, user=found.st_uid + 1) == f"belongs to user {found.st_uid}"


def test_the_folder_of_ray_is_open_to_others_only_below_one_that_is_not(temp):
    temp = temp if len(str(temp)) < 18 else Path(tempfile.mkdtemp(dir="/tmp"))
    tempfile.tempdir = str(temp)
    folder = private_folder.new_ray_folder()
    assert folder.parent == temp and mode_of(folder) == 0o700 and not (folder / "ray").is_symlink()
    assert private_folder.new_ray_folder() != folder
    for made in (*temp.iterdir(),):
        private_folder.remove_ray_folder(made)
    temp.rmdir()


def test_where_the_path_is_too_long_for_sockets_they_have_a_short_one_and_the_files_stay(temp, monkeypatch):
    long = temp / ("long" * 10)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    folder = private_folder.new_ray_folder()
    assert folder.parent == Path("/tmp") and mode_of(folder) == 0o700
    [files] = long.iterdir()
    assert (folder / "ray").resolve() == files.resolve() and mode_of(files) == 0o700
    session = folder / "ray/session_2026-11-28_16-56-05_123456_1234567/sockets"
    session.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(session / "plasma_store.1"))
    private_folder.remove_ray_folder(folder)
    assert list(long.iterdir()) == [] and not folder.exists()


def test_scripts_get_a_folder_for_ray_by_name(temp):
    command = [sys.executable, "-m", "slime.utils.private_folder"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    folder = Path(done.stdout.strip())
    assert mode_of(folder) == 0o700 and (folder / "ray").is_dir()
    private_folder.remove_ray_folder(folder)


def test_a_temporary_folder_whose_files_others_may_exchange_is_said(temp, caplog):
    private_folder.new_folder("x")
    assert caplog.text == ""
    temp.chmod(0o777)
    assert mode_of(private_folder.new_folder("x")) == 0o700
    assert "Other users may exchange files" in caplog.text
