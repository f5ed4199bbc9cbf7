"""The job's Ray cluster: which one it joins, what a private one leaves, and which deaths end a wait."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RpcError

from slime.ray import cluster, utils
from slime.ray.cluster import ANSWER_TIMEOUT_S, CHECK_EVERY_S, SILENT_S, RayServers, leave_ray, own_cluster
from slime.utils import env, net
from slime.utils.errors import ConfigError, ProcessError
from slime.utils.files import remove_ray_folder

STRANGER = 54321
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files and processes to another user")


def test_a_cluster_that_is_named_and_does_not_answer_is_not_replaced_by_a_private_one(monkeypatch):
    def refuse(**options: object) -> None:
        raise ConnectionError("nobody listens")

    started: list[object] = []
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", refuse)
    monkeypatch.setattr(cluster, "_start", lambda *resources: started.append(resources))
    args = Namespace(driver_variables=["MY_KEY"])
    monkeypatch.setenv("MY_KEY", "k")
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(ConfigError, match="RAY_ADDRESS is ray://10.0.0.1:10001.*nobody listens"):
        cluster.connect(args)
    assert started == []
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(cluster, "own_cluster", lambda: None)
    monkeypatch.setattr(cluster, "plan_gpus", lambda args: Namespace(num_gpus=2))
    monkeypatch.setattr(cluster.torch.cuda, "is_available", lambda: False)
    cluster.connect(args)
    monkeypatch.setattr(cluster, "own_cluster", lambda: "127.0.0.1:1")  # it has died meanwhile
    cluster.connect(args)
    monkeypatch.setattr(cluster.os, "cpu_count", lambda: 1)
    args.value_origins = {}  # the user did not ask for two ranks
    with pytest.raises(ConfigError, match="--actor-num-gpus-per-node is not given.*has no GPU and 1 cores"):
        cluster.connect(args)
    args.value_origins["actor_num_gpus_per_node"] = "flag"
    assert cluster._gpus_of_private_cluster(args) == 2
    monkeypatch.setattr(cluster.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cluster.torch.cuda, "device_count", lambda: 1)
    vars(args).update(actor_num_gpus_per_node=2, actor_num_nodes=1, rollout_num_gpus=2)
    with pytest.raises(ConfigError, match=r"needs 2 GPUs; this machine has 1.*--actor-num-gpus-per-node \(2\)"):
        cluster.connect(args)
    assert started == [(2, 8), (2, 8)] and env.get_str("MY_KEY") is None


@pytest.mark.parametrize("given", ["", "a token"])
def test_a_private_cluster_and_its_token_are_in_a_folder_of_this_user_alone_which_ends_with_the_job(
    given, tmp_path, monkeypatch
):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # restored by monkeypatch at the end
        monkeypatch.delenv(name)
    monkeypatch.setattr(cluster, "Config", Namespace(initialize=lambda text: None))  # Ray's config of this process
    options: list[dict[str, object]] = []
    monkeypatch.setattr(cluster.ray, "init", lambda **given: options.append(given))
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    for keeps_logs in (True, False):
        monkeypatch.setenv("RAY_AUTH_TOKEN", given)
        cluster._start(1, 2)
        token = Path(env.get_str("RAY_AUTH_TOKEN_PATH") or "")
        folder = token.parent
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert token.read_text() == given if given else len(token.read_text()) == 64
        assert token.read_text() not in env.copy().values()
        assert options.pop()["_temp_dir"] == str(folder / "ray")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.geteuid()
        cluster.disconnect(keeps_logs=keeps_logs)
        assert not token.exists() and (folder / "ray").is_dir() == folder.exists() == keeps_logs
        remove_ray_folder(folder)
        env.unset("RAY_AUTH_TOKEN_PATH")


def test_collectives_of_one_node_are_on_loopback_and_those_of_several_are_not(monkeypatch):
    for name in ("SLIME_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "SLIME_PREFER_IPV6"):
        monkeypatch.delenv(name, raising=False)
    nodes = [{"Alive": True}, {"Alive": False}]
    monkeypatch.setattr(utils, "ray", Namespace(is_initialized=lambda: True, nodes=lambda: nodes))
    assert utils.one_node_environment() == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert utils.one_node_environment()["NCCL_SOCKET_IFNAME"] == "eth7"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert net.collective_address() == "127.0.0.1"
    nodes.append({"Alive": True})
    assert utils.one_node_environment() == {}
    del nodes[1:]
    monkeypatch.setenv("SLIME_HOST_IP", "10.0.0.1")
    assert utils.one_node_environment() == {}


class StartedByHand:
    """Files and processes that ``ray start`` leaves: an address file, a session folder, a raylet, and a listener."""

    def __init__(self, folder: Path, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.file = folder / "ray" / "ray_current_cluster"
        self.session = folder / "ray" / "session_1"
        self.head = "127.0.0.1"
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
def by_hand(tmp_path, monkeypatch, processes) -> Iterator[StartedByHand]:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = StartedByHand(tmp_path, server.getsockname()[1])
        processes.append(made.start_raylet())
        yield made


def test_the_cluster_that_this_user_started_is_found(by_hand, caplog):
    assert own_cluster() == by_hand.address
    by_hand.file.unlink()
    assert own_cluster() is None
    by_hand.file.write_text("127.0.0.1:1")  # a cluster that has ended
    assert own_cluster() is None and caplog.text == ""


def replace_by_a_link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to(path.with_name("other"))


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER)


@pytest.mark.parametrize(
    ("what", "change", "message"),
    [
        ("sockets", replace_by_a_link, "sockets is a link"),
        pytest.param("session", give_away, "belongs to user 54321", marks=AS_ROOT),
    ],
)
def test_files_that_another_user_may_have_put_there_are_not_followed(
    by_hand: StartedByHand, caplog: pytest.LogCaptureFixture, what: str, change: Callable[[Path], None], message: str
) -> None:
    change({"session": by_hand.session, "sockets": by_hand.session / "sockets"}[what])
    assert own_cluster() is None
    assert message in caplog.text and "set RAY_ADDRESS to its address" in caplog.text


@AS_ROOT
def test_a_cluster_of_another_user_is_not_joined(tmp_path, monkeypatch, processes, caplog):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    found = StartedByHand(tmp_path, 1)
    processes.append(found.start_raylet(user=STRANGER))
    assert own_cluster() is None and caplog.text == ""  # like a machine without a cluster


SCRIPT, WORKER = 0, 1


class FakeRay:
    """Ray as this process sees it."""

    def __init__(self, logs: Path) -> None:
        self.dead: list[Any] = []
        self.answer: list[bool] | None = [True]
        self.now_s, self.num_asked = 1000.0, 0
        client = Namespace(check_alive=self.check_alive, address="10.0.0.1:6379")
        self.worker = Namespace(mode=SCRIPT, gcs_client=client)
        node = Namespace(dead_processes=lambda: self.dead, get_logs_dir_path=lambda: str(logs))
        self.module = Namespace(
            SCRIPT_MODE=SCRIPT,
            _private=Namespace(worker=Namespace(global_worker=self.worker, _global_node=node)),
            get_runtime_context=lambda: Namespace(get_node_id=lambda: "ab" * 28),
        )

    def check_alive(self, nodes: list[Any], timeout_s: float) -> list[bool]:
        assert len(nodes) == 1 and timeout_s == ANSWER_TIMEOUT_S
        self.num_asked += 1
        if self.answer is None:
            raise RpcError("no answer")
        return self.answer


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRay:
    made = FakeRay(tmp_path)
    monkeypatch.setattr(cluster, "ray", made.module)
    monkeypatch.setattr(cluster, "time", Namespace(monotonic=lambda: made.now_s))
    return made


def test_a_raylet_that_ended_is_named_with_the_end_of_its_log(fake_ray: FakeRay, tmp_path: Path) -> None:
    (tmp_path / "raylet.err").write_text("one\ncheck failed\n")
    fake_ray.dead = [("log_monitor", Namespace(pid=6, returncode=1))]
    RayServers().check()  # nothing needs that server
    fake_ray.dead += [("raylet", Namespace(pid=7, returncode=-9))]
    with pytest.raises(ProcessError, match=r"Ray's raylet \(process 7\) ended with status -9(.|\n)*check failed"):
        RayServers().check()
    fake_ray.worker.mode = WORKER  # an actor ends with its raylet
    RayServers().check()


def test_a_gcs_may_be_silent_for_some_time_and_not_longer(fake_ray: FakeRay) -> None:
    servers = RayServers()
    for _ in range(2):
        servers.check()
    assert fake_ray.num_asked == 1  # at most every few seconds
    fake_ray.now_s += 3600  # time without checks does not count
    fake_ray.answer = None
    for _ in range(int(SILENT_S / CHECK_EVERY_S) + 1):
        servers.check()
        fake_ray.now_s += CHECK_EVERY_S
    for _ in range(2):  # a caller that catches the first error gets it again
        with pytest.raises(ProcessError, match="gcs_server at 10.0.0.1:6379 has not answered for 48 s"):
            servers.check()
    fake_ray.answer = [True]
    servers.check()


def test_a_node_that_the_gcs_counts_as_dead_is_named(fake_ray: FakeRay) -> None:
    fake_ray.answer = [False]
    with pytest.raises(ProcessError, match="considers the driver's node dead: its raylet"):
        RayServers().check()


def test_processes_that_hang_are_killed_when_the_driver_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = threading.Event()
    node = Namespace(kill_all_processes=lambda **_: killed.set())
    worker = Namespace(_global_node=node)
    monkeypatch.setattr(cluster, "LEAVE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(cluster, "ray", Namespace(_private=Namespace(worker=worker), shutdown=lambda: killed.wait(60)))
    leave_ray()
    assert killed.is_set()
