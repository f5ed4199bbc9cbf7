"""The store through which ranks meet."""

import socket
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from slime.utils import distributed_utils
from slime.utils.distributed_utils import hold_port, open_store
from slime.utils.net import get_free_port

LIMIT = {"world_size": 2, "timeout": timedelta(seconds=20)}


def test_the_store_of_ranks_listens_at_its_own_address_alone():
    port = get_free_port(24500)
    first = open_store("127.0.0.1", port, rank=0, **LIMIT)
    second = open_store("127.0.0.1", port, rank=1, **LIMIT)
    second.set("word", "given")
    assert first.get("word") == b"given"
    sockets = psutil.Process().net_connections("tcp")
    listening = {each.laddr for each in sockets if each.status == psutil.CONN_LISTEN and each.laddr.port == port}
    assert listening == {("127.0.0.1", port)}
    with pytest.raises(RuntimeError, match=f"127.0.0.1:{port}: .*[Ii]n use"):
        open_store("127.0.0.1", port, rank=0, **LIMIT)


def test_a_port_is_held_until_its_store_is_opened(monkeypatch):
    monkeypatch.setattr(distributed_utils._rendezvous, "_create_c10d_store", None)
    first = get_free_port(24900)
    port, other = hold_port("127.0.0.1", first), hold_port("127.0.0.1", first)
    assert first <= port < other
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError):  # other ranks keep waiting until the store's timeout
        socket.create_connection(("127.0.0.1", port), timeout=10)
    store = open_store("127.0.0.1", port, rank=0, world_size=1, timeout=LIMIT["timeout"])
    store.set("word", "given")
    assert open_store("127.0.0.1", port, rank=1, **LIMIT).get("word") == b"given"
    assert port not in distributed_utils._HELD
    distributed_utils._HELD.pop(other).close()


def test_under_torchrun_ranks_meet_at_the_store_of_the_launcher(monkeypatch):
    port = get_free_port(24700)
    launcher = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", str(port))
    first, second = (open_store("127.0.0.1", port, rank=rank, **LIMIT) for rank in range(2))
    second.set("word", "given")
    assert first.get("word") == b"given"
    assert launcher.num_keys() > 0
    other = get_free_port(24800)
    assert open_store("127.0.0.1", other, rank=0, **LIMIT).port == other  # a group's own store is unaffected
