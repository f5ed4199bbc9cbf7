"""A private cluster stays on this host, and its token in a file."""

from __future__ import annotations

import os
import stat
from argparse import Namespace
from pathlib import Path

import pytest

from slime.ray import connect, utils
from slime.utils import env, net
from slime.utils.errors import ConfigError
from slime.utils.private_folder import new_ray_folder, remove_ray_folder


@pytest.fixture
def folder():
    made = new_ray_folder()
    yield made
    remove_ray_folder(made)


@pytest.mark.parametrize("given", ["", "a token"])
def test_the_token_of_a_private_cluster_is_in_a_file_of_this_user_and_in_no_environment(given, monkeypatch, folder):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", given)
    connect._make_token(folder)
    path = Path(env.get_str("RAY_AUTH_TOKEN_PATH") or "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.read_text() == given if given else len(path.read_text()) == 64
    assert path.read_text() not in env.copy().values()
    connect._make_token(folder)
    assert env.get_str("RAY_AUTH_TOKEN_PATH") == str(path)


def test_a_cluster_that_is_named_and_does_not_answer_is_not_replaced_by_a_private_one(monkeypatch):
    def refuse(**options: object) -> None:
        raise ConnectionError("nobody listens")

    started: list[object] = []
    monkeypatch.setattr(connect.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connect.ray, "init", refuse)
    monkeypatch.setattr(connect, "_start", lambda *resources: started.append(resources))
    args = Namespace(wandb_key=None)
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(ConfigError, match="RAY_ADDRESS is ray://10.0.0.1:10001.*nobody listens"):
        connect.connect(args)
    assert started == []
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(connect, "own_cluster", lambda: None)
    monkeypatch.setattr(connect, "plan_gpus", lambda args: Namespace(num_gpus=2))
    monkeypatch.setattr(connect.torch.cuda, "is_available", lambda: False)
    connect.connect(args)
    monkeypatch.setattr(connect, "own_cluster", lambda: "127.0.0.1:1")  # it has died since
    connect.connect(args)
    assert started == [(2, 8), (2, 8)]


def test_a_private_cluster_is_in_a_folder_of_this_user_alone_which_ends_with_the_job(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    options: list[dict[str, object]] = []
    monkeypatch.setattr(connect.ray, "init", lambda **given: options.append(given))
    monkeypatch.setattr(connect.ray, "is_initialized", lambda: False)
    for keeps_logs in (True, False):
        connect._start(1, 2)
        folder = Path(env.get_str("RAY_AUTH_TOKEN_PATH") or "").parent
        assert options.pop()["_temp_dir"] == str(folder / "ray")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.geteuid()
        connect.disconnect(keeps_logs=keeps_logs)
        assert not (folder / "token").exists() and (folder / "ray").is_dir() == folder.exists() == keeps_logs
        remove_ray_folder(folder)
        env.unset("RAY_AUTH_TOKEN_PATH")


def test_without_ray_s_authentication_there_is_no_token(monkeypatch, folder):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    connect._make_token(folder)
    assert env.get_str("RAY_AUTH_TOKEN_PATH") is None and list(folder.iterdir()) == [folder / "ray"]


def test_collectives_of_one_node_are_on_loopback_and_those_of_several_are_not(monkeypatch):
    for name in ("SLIME_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "SLIME_PREFER_IPV6"):
        monkeypatch.delenv(name, raising=False)
    nodes = [{"Alive": True}, {"Alive": False}]
    fake = Namespace(is_initialized=lambda: True, nodes=lambda: nodes)
    monkeypatch.setattr(utils, "ray", fake)
    assert utils.one_node_environment() == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert utils.one_node_environment()["NCCL_SOCKET_IFNAME"] == "eth7"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert net.collective_address() == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert net.collective_address() == net.get_current_node_ip()
    nodes.append({"Alive": True})
    assert utils.one_node_environment() == {}
    del nodes[1:]
    monkeypatch.setenv("SLIME_HOST_IP", "10.0.0.1")
    assert utils.one_node_environment() == {}
