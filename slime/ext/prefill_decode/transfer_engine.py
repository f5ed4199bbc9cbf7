"""Host memory written by another process of this machine: what SGLang asks of Mooncake, for engines without a GPU.

A prefill engine writes keys and values straight into the memory of a decode engine.  On GPUs that is RDMA, done by
Mooncake's ``TransferEngine``, of which there is no build for this platform.  SGLang's side of it is plain Python: it
hands over addresses.  So a class with the same methods, over Unix sockets, lets the same SGLang code move a cache
between two CPU engines of one machine and one user.  Nothing here is fast, and nothing leaves the machine.

One write: ``count`` as a 64-bit number, ``count`` pairs (address, length), then the bytes; the answer is one byte, 1
for done.  Only memory that was registered is written to.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import os
import socket
import struct
import threading
from collections.abc import Sequence

logger = logging.getLogger(__name__)

DONE, REFUSED = b"\x01", b"\x00"
FAILED = -1
TIMEOUT_S = 60.0
"""Deadline of one write; the engine that waits for it gives up later than that."""


class TransferEngine:
    """Memory of this process that others may write to, and writes into theirs.

    Invariant: a peer's session is ``host:number``; the number names its socket.
    """

    def __init__(self) -> None:
        self._number = -1
        self._regions: dict[int, int] = {}
        self._lock = threading.Lock()
        self._peers: dict[str, tuple[socket.socket, threading.Lock]] = {}

    def initialize(self, hostname: str, metadata_server: str, protocol: str, device_name: str) -> int:
        """Listen for writes; 0 when that worked, as all methods here."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("")  # the kernel chooses a name that nobody has: five hexadecimal digits
        self._number = int(listener.getsockname()[1:], 16)
        listener.listen()
        threading.Thread(target=self._accept, args=(listener,), name="kv-listen", daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        return self._number

    # --- memory that others may write to --------------------------------------------------------------------------

    def register_memory(self, address: int, length: int) -> int:
        """Allow writes to ``length`` bytes from ``address`` on."""
        with self._lock:
            self._regions[address] = max(length, self._regions.get(address, 0))
        return 0

    def unregister_memory(self, address: int) -> int:
        with self._lock:
            return 0 if self._regions.pop(address, None) is not None else FAILED

    def batch_register_memory(self, addresses: Sequence[int], lengths: Sequence[int]) -> int:
        return min((self.register_memory(*region) for region in zip(addresses, lengths, strict=True)), default=0)

    def batch_unregister_memory(self, addresses: Sequence[int]) -> int:
        return min((self.unregister_memory(address) for address in addresses), default=0)

    def _is_registered(self, address: int, length: int) -> bool:
        with self._lock:
            starts = sorted(self._regions)
            index = bisect.bisect_right(starts, address) - 1
            return index >= 0 and address + length <= starts[index] + self._regions[starts[index]]

    # --- writes into the memory of others -------------------------------------------------------------------------

    def transfer_sync_write(self, session: str, source: int, target: int, length: int) -> int:
        """Copy ``length`` bytes from ``source`` here to ``target`` in the process of ``session``."""
        return self.batch_transfer_sync_write(session, [source], [target], [length])

    def batch_transfer_sync_write(
        self, session: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Write several ranges at once, as :meth:`transfer_sync_write`; -1 when the peer is gone or refuses."""
        ranges = [number for pair in zip(targets, lengths, strict=True) for number in pair]
        try:
            connection, lock = self._connect(session)
            with lock:
                connection.sendall(struct.pack(f"<Q{len(ranges)}Q", len(targets), *ranges))
                for source, length in zip(sources, lengths, strict=True):
                    connection.sendall(_memory(source, length))
                if connection.recv(1) == DONE:
                    return 0
        except OSError as error:
            logger.debug("a write into %s failed: %s", session, error)
        self._forget(session)
        return FAILED

    def _forget(self, session: str) -> None:
        """Hang up: after a failure neither side knows where in the stream the other is."""
        with self._lock:
            connection, _ = self._peers.pop(session, (None, None))
        if connection is not None:
            connection.close()

    def send_probe(self, session: str) -> int:
        """Return 0 when the process of ``session`` answers."""
        return self.batch_transfer_sync_write(session, [], [], [])

    def _connect(self, session: str) -> tuple[socket.socket, threading.Lock]:
        with self._lock:
            if session not in self._peers:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(TIMEOUT_S)
                try:
                    connection.connect(_socket_name(int(session.rpartition(":")[2])))
                    if not _is_same_user(connection):
                        raise PermissionError(f"the peer {session} is another user's")
                except OSError:
                    connection.close()
                    raise
                self._peers[session] = connection, threading.Lock()
            return self._peers[session]

    # --- the other side of a write --------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:  # for as long as the process lives
            connection, _ = listener.accept()
            if not _is_same_user(connection):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="kv-receive", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Take writes of one peer until it hangs up or oversteps."""
        with connection:
            while (header := _receive(connection, 8)) is not None:
                (count,) = struct.unpack("<Q", header)
                packed = _receive(connection, 16 * count)
                if packed is None:
                    return
                numbers = struct.unpack(f"<{2 * count}Q", packed)
                for address, length in zip(numbers[::2], numbers[1::2], strict=True):
                    if not self._is_registered(address, length):
                        connection.sendall(REFUSED)
                        return  # the bytes that follow have no place
                    if not _receive_into(connection, _memory(address, length)):
                        return
                connection.sendall(DONE)


def _socket_name(number: int) -> str:
    """Return the name of an abstract socket, which has no file and vanishes with its process."""
    return f"\0{number:05x}"


def _is_same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return user == os.getuid()


def _memory(address: int, length: int) -> memoryview:
    """Return ``length`` bytes of this process from ``address`` on."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def _receive(connection: socket.socket, length: int) -> bytearray | None:
    data = bytearray(length)
    return data if _receive_into(connection, memoryview(data)) else None


def _receive_into(connection: socket.socket, target: memoryview) -> bool:
    """Fill ``target``; False when the peer hung up before."""
    while target:
        count = connection.recv_into(target)
        if count == 0:
            return False
        target = target[count:]
    return True
