"""Only a Ray cluster of this user is joined without being named."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime.ray.own_cluster import own_cluster

STRANGER = 54321
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files and processes to another user")
LISTEN_AS = """
import os, socket, sys
server = socket.create_server(("127.0.0.1", 0))
os.setuid(int(sys.argv[1]))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


class Cluster:
    """What ``ray start`` leaves on a machine: a file with the address, a session folder, a raylet, and a listener."""

    def __init__(self, folder: Path, port: int, head: str = "127.0.0.1") -> None:
        self.address = f"127.0.0.1:{port}"
        self.file = folder / "ray" / "ray_current_cluster"
        self.session = folder / "ray" / "session_1"
        self.head = head
        (self.session / "sockets").mkdir(parents=True)
        for name in ("raylet", "plasma_store"):
            (self.session / "sockets" / name).touch()
        self.file.write_text(self.address)

    def start_raylet(self, **options: int) -> subprocess.Popen[bytes]:
        words = [f"--gcs-address={self.address}", f"--session_dir={self.session}", f"--node_ip_address={self.head}"]
        words += [f"--raylet_socket_name={self.session}/sockets/raylet"]
        words += [f"--store_socket_name={self.session}/sockets/plasma_store"]
        command = ["/opt/ray/raylet", "-c", "read line", *words]
        return subprocess.Popen(command, executable="/bin/sh", stdin=subprocess.PIPE, **options)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=20)


@pytest.fixture
def cluster(tmp_path, monkeypatch, processes) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = Cluster(tmp_path, server.getsockname()[1])
        processes.append(made.start_raylet())
        yield made


def test_the_cluster_that_this_user_started_is_found(cluster, caplog):
    assert own_cluster() == cluster.address
    cluster.file.unlink()
    assert own_cluster() is None
    cluster.file.write_text("127.0.0.1:1")  # of a cluster that has ended
    assert own_cluster() is None and caplog.text == ""


def replace_by_a_link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to(path.with_name("other"))


def give_a_second_name(path: Path) -> None:
    os.link(path, path.with_name("other"))


def make_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER)


WAYS = [
    ("file", replace_by_a_link, "Too many levels of symbolic links"),
    ("file", give_a_second_name, "has a second name"),
    ("file", make_a_pipe, "it is no file"),
    ("folder", replace_by_a_link, "ray is a link"),
    ("session", replace_by_a_link, "session_1 is a link"),
    ("sockets", replace_by_a_link, "sockets is a link"),
    ("socket", replace_by_a_link, "raylet is a link"),
    *(
        pytest.param(name, give_away, "belongs to user 54321", marks=AS_ROOT)
        for name in ("file", "folder", "session", "sockets", "socket")
    ),
]


@pytest.mark.parametrize(("what", "change", "message"), WAYS)
def test_what_another_user_may_have_put_there_is_not_followed(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, what: str, change: Callable[[Path], None], message: str
) -> None:
    sockets = cluster.session / "sockets"
    paths = {"file": cluster.file, "folder": cluster.file.parent, "session": cluster.session}
    change((paths | {"sockets": sockets, "socket": sockets / "raylet"})[what])
    assert own_cluster() is None
    assert message in caplog.text and "give its address by RAY_ADDRESS" in caplog.text


@AS_ROOT
def test_an_address_at_which_another_user_runs_the_servers_is_not_joined(tmp_path, monkeypatch, processes, caplog):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    command = [sys.executable, "-c", LISTEN_AS, str(STRANGER)]
    processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    port = int(processes[0].stdout.readline())  # type: ignore[union-attr]
    cluster = Cluster(tmp_path, port)
    processes.append(cluster.start_raylet(user=STRANGER))
    assert own_cluster() is None and caplog.text == ""  # as where no cluster is
    processes.append(cluster.start_raylet())
    assert own_cluster() is None and f"another user's server listens at port {port}" in caplog.text
    processes.pop().kill()
    cluster.head = "10.0.0.7"  # the head is elsewhere; this node's raylet is this user's
    processes.append(cluster.start_raylet())
    assert own_cluster() == cluster.address
