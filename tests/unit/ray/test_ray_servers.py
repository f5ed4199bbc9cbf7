"""Ray's own processes: which deaths and silences end a wait of the driver, and how the driver leaves them."""

from __future__ import annotations

import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RpcError

from slime.ray import ray_servers
from slime.ray.ray_servers import ANSWER_TIMEOUT_S, CHECK_EVERY_S, SILENT_S, RayServers, leave_ray
from slime.utils.errors import ProcessError

SCRIPT, WORKER = 0, 1


class Cluster:
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
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    made = Cluster(tmp_path)
    monkeypatch.setattr(ray_servers, "ray", made.module)
    monkeypatch.setattr(ray_servers, "time", Namespace(monotonic=lambda: made.now_s))
    return made


def test_a_raylet_that_ended_is_named_with_the_end_of_its_log(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "raylet.err").write_text("one\ncheck failed\n")
    cluster.dead = [("raylet", Namespace(pid=7, returncode=-9))]
    with pytest.raises(ProcessError, match=r"Ray's raylet \(process 7\) ended with status -9(.|\n)*check failed"):
        RayServers().check()


def test_a_process_that_no_wait_needs_may_end(cluster: Cluster) -> None:
    cluster.dead = [("log_monitor", Namespace(pid=7, returncode=1))]
    RayServers().check()


def test_an_actor_asks_nothing_because_it_ends_with_its_raylet(cluster: Cluster) -> None:
    cluster.worker.mode = WORKER
    cluster.dead = [("raylet", Namespace(pid=7, returncode=-9))]
    RayServers().check()
    assert cluster.num_asked == 0


def test_the_gcs_is_asked_every_few_seconds(cluster: Cluster) -> None:
    servers = RayServers()
    for _ in range(2):
        servers.check()
    assert cluster.num_asked == 1
    cluster.now_s += CHECK_EVERY_S
    servers.check()
    assert cluster.num_asked == 2


def test_a_gcs_may_be_silent_for_some_time_and_not_longer(cluster: Cluster) -> None:
    servers = RayServers()
    servers.check()
    cluster.answer = None
    for _ in range(int(SILENT_S / CHECK_EVERY_S)):
        cluster.now_s += CHECK_EVERY_S
        servers.check()
    cluster.now_s += CHECK_EVERY_S
    for _ in range(2):  # whoever catches the first error meets it again
        with pytest.raises(ProcessError, match="gcs_server at 10.0.0.1:6379 has not answered for 48 s"):
            servers.check()
    cluster.answer = [True]
    servers.check()


def test_the_time_in_which_nobody_asked_does_not_count_as_silence(cluster: Cluster) -> None:
    servers = RayServers()
    servers.check()
    cluster.now_s += 3600
    cluster.answer = None
    servers.check()


def test_a_node_that_the_gcs_counts_as_dead_is_named(cluster: Cluster) -> None:
    cluster.answer = [False]
    with pytest.raises(ProcessError, match="counts this node, the driver's, as dead: its raylet"):
        RayServers().check()


def test_processes_that_hang_are_killed_when_the_driver_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = threading.Event()
    node = Namespace(kill_all_processes=lambda **_: killed.set())
    worker = Namespace(_global_node=node)
    monkeypatch.setattr(ray_servers, "LEAVE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(
        ray_servers, "ray", Namespace(_private=Namespace(worker=worker), shutdown=lambda: killed.wait(60))
    )
    leave_ray()
    assert killed.is_set()
