"""The transports of a push, one a file; to add one, write its file and give it a row here."""

from __future__ import annotations

from slime.weights.push.transports.base import Transport
from slime.weights.push.transports.delta import DeltaTransport
from slime.weights.push.transports.disk import DiskTransport
from slime.weights.push.transports.distributed import DistributedTransport
from slime.weights.push.transports.shared_memory import SharedMemoryTransport

TRANSPORTS: dict[str, type[Transport]] = {
    "shared_memory": SharedMemoryTransport,
    "distributed": DistributedTransport,
    "disk": DiskTransport,
    "delta": DeltaTransport,
}
"""``--update-weight-mode``, ``--update-weight-transport`` and ``--colocate`` choose the row."""
