"""Memory written by a peer: values arrive, and nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from slime.ext.prefill_decode.transfer_engine import FAILED, TransferEngine


@pytest.fixture(scope="module")
def engine() -> TransferEngine:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "") == 0
    return engine


@pytest.fixture
def session(engine: TransferEngine) -> str:
    return f"127.0.0.1:{engine.get_rpc_port()}"


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_ranges_land_where_they_were_sent_and_nowhere_else(engine, session):
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    assert engine.batch_register_memory([address(target)], [64]) == 0
    sources, targets, lengths = [address(source), address(source) + 32], [address(target) + 8, address(target)], [4, 2]
    assert engine.batch_transfer_sync_write(session, sources, targets, lengths) == 0
    assert list(target[:12]) == [32, 33, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3]
    assert not target[12:].any()
    assert engine.batch_unregister_memory([address(target)]) == 0


@pytest.mark.parametrize(("offset", "length"), [(-1, 4), (14, 4), (0, 17)])
def test_a_write_that_leaves_the_registered_region_is_refused(engine, session, offset, length):
    source, target = np.full(32, 7, dtype=np.uint8), np.zeros(32, dtype=np.uint8)
    engine.register_memory(address(target) + 8, 16)
    where = address(target) + 8 + offset
    assert engine.transfer_sync_write(session, address(source), where, length) == FAILED
    assert not target.any()
    assert engine.unregister_memory(address(target) + 8) == 0
    assert engine.send_probe(session) == 0  # over a new connection


LISTEN_AS = """
import os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind("")
os.setuid(54321)
server.listen()
print(int(server.getsockname()[1:], 16), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_nothing_is_written_to_a_peer_of_another_user(engine):
    other = subprocess.Popen([sys.executable, "-c", LISTEN_AS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    session = f"127.0.0.1:{int(other.stdout.readline())}"
    with pytest.raises(PermissionError, match="another user's"):
        engine._connect(session)
    assert engine.send_probe(session) == FAILED
    other.communicate(timeout=20)
