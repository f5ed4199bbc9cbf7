"""A carrier over plain TCP sockets: everything that a new carrier needs.

trainer    TcpCarrier                      open: one connection to each engine;  send: index, length, bytes
engine     receive_from(listener, load)    load(index, flat) for every bucket, then one byte as the answer
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from slime.ext.fast_push.carrier import NO_BUCKET, CarriedPush, Carrier
from slime.ext.fast_push.manifest import Manifest
from slime.weights.push.participants import PUSH_FAILURES, reason_of

HEADER = struct.Struct("<qq")
"""Index of the bucket, and its bytes."""


class TcpCarrier(Carrier):
    """Rank 0, which has every bucket, sends it to ``engine.tcp_port`` of each engine on this host."""

    def open(self, push: CarriedPush, manifest: Manifest) -> None:
        self.connections: dict[int, socket.socket] = {}

        def connect() -> None:
            for engine in push.participants.good:
                address = ("127.0.0.1", engine.tcp_port)
                try:
                    self.connections[engine.index] = socket.create_connection(address, push.participants.clock.step_s)
                except PUSH_FAILURES as error:
                    push.participants.exclude(engine.index, f"{reason_of(error)} (while connecting)")

        push.on_main_rank("connecting to the engines", connect)

    def send(self, push: CarriedPush, index: int, flat: Tensor) -> None:
        if index == NO_BUCKET or self.ranks.rank != 0:
            return
        for engine in push.participants.good:
            connection = self.connections[engine.index]
            try:
                connection.settimeout(push.participants.clock.step_s)
                connection.sendall(HEADER.pack(index, flat.numel()))
                connection.sendall(flat.cpu().numpy())
                if not connection.recv(1):
                    raise EOFError("the engine hung up")
            except PUSH_FAILURES as error:
                push.participants.exclude(engine.index, f"{reason_of(error)} (while loading bucket {index})")


def receive_from(listener: socket.socket, load: Callable[[int, Tensor], None]) -> None:
    """The engine's end: load what every connecting trainer sends, until it hangs up."""
    while True:
        connection, _ = listener.accept()
        with connection:
            while header := _read(connection, HEADER.size):
                index, size = HEADER.unpack(header)
                load(index, torch.frombuffer(bytearray(_read(connection, size)), dtype=torch.uint8))
                connection.sendall(b".")


def _read(connection: socket.socket, size: int) -> bytes:
    """``size`` bytes; empty if the other end hung up."""
    data = b""
    while len(data) < size and (part := connection.recv(size - len(data))):
        data += part
    return data
