"""Stores of process groups; every trainer's gloo group, and the exchange of objects over it."""

from __future__ import annotations

import errno
import importlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from slime.utils import env
from slime.utils.errors import ProcessError
from slime.utils.net import format_host_port, get_free_port, is_ipv6

_GROUPS: dict[str, dist.ProcessGroup] = {}
"""Purpose -> group, because torch.distributed has no such registry."""
FILE_TIMEOUT = timedelta(hours=24)
"""Timeout of a wait for files that another rank writes; the run's own deadline (--train-timeout-s) is shorter."""
_HELD: dict[int, socket.socket] = {}
"""Port -> socket that this process has bound for a store to be opened later."""
BACKLOG = 1024
NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Read when a group is created.  torch would end a process whose broadcast hangs; slime leaves the group instead."""
_rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of that name
_torch_store = _rendezvous._create_c10d_store


def hold_port(address: str, first_port: int) -> int:
    """Bind the first free port from ``first_port`` on, until :func:`open_store` listens there; return the port.

    A port that is not bound may be taken by another process before the ranks meet.  A bound port refuses connections,
    so other ranks retry until their timeout for the store.
    """
    bind_stores()  # so that torch's own rendezvous store in this process uses the held port too
    port = get_free_port(first_port)
    while True:
        held = socket.socket(_family(address))  # without SO_REUSEADDR, which would let others bind it too
        try:
            held.bind((address, port))
        except OSError as error:
            held.close()
            if error.errno == errno.EADDRNOTAVAIL:
                return port
            if error.errno != errno.EADDRINUSE:
                raise
            port = get_free_port(port + 1)
        else:
            _HELD[port] = held
            return port


def _listen(address: str, port: int) -> socket.socket:
    if held := _HELD.pop(port, None):
        held.listen(BACKLOG)
        return held
    return socket.create_server((address, port), family=_family(address), backlog=BACKLOG)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if is_ipv6(address) else socket.AF_INET


def open_store(
    address: str, port: int, *, rank: int, world_size: int, timeout: timedelta, counts_ranks: bool = False
) -> dist.Store:
    """Return the store through which ranks meet; rank 0 serves it, on that address only.

    torch itself would listen on all interfaces, and the store has no authentication.  Under torchrun, the launcher
    already serves the store at ``MASTER_PORT``.

    Args:
        timeout: maximum wait for the store, and for a key in it.
        counts_ranks: True if each rank registers and rank 0 waits for all, as in torch's own rendezvous stores; must
            be equal on all ranks.

    Raises:
        RuntimeError: the port is taken, or rank 0 does not answer within ``timeout``.
    """
    host = address.strip("[]")
    if _rendezvous._torchelastic_use_agent_store() and port == env.get_int("MASTER_PORT", 0):
        return _torch_store(host, port, rank, world_size, timeout)
    listener = None
    if rank == 0:
        try:
            listener = _listen(host, port).detach()
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # the address belongs to a gateway in front of this host
                raise RuntimeError(f"{format_host_port(host, port)}: {error.strerror}") from error
    return dist.TCPStore(
        host, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=counts_ranks,
        master_listen_fd=listener,
    )  # fmt: skip


def bind_stores() -> None:
    """Make torch's rendezvous stores in this process listen like those of :func:`open_store`."""
    _rendezvous._create_c10d_store = _bound_store


def _bound_store(
    hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
) -> dist.Store:
    # Other ranks may be processes with torch's own stores, which wait until all ranks have registered.
    return open_store(hostname, port, rank=rank, world_size=world_size, timeout=timeout, counts_ranks=True)


def init_gloo_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return the gloo group of all ranks, creating it in the first call, which every rank must make.

    Args:
        timeout: timeout of one collective; None for torch's default.
    """
    return _existing_or_new("gloo", timeout)


def init_file_group() -> dist.ProcessGroup:
    """Return the gloo group in which ranks wait for each other's files, creating it in the first call.

    Every rank must make that call.  The group is separate because writing may take longer than a training collective's
    timeout.
    """
    return _existing_or_new("files", FILE_TIMEOUT)


def _existing_or_new(name: str, timeout: timedelta | None) -> dist.ProcessGroup:
    if name not in _GROUPS or not _is_alive(_GROUPS[name]):
        _GROUPS[name] = dist.new_group(backend="gloo", timeout=timeout)
    return _GROUPS[name]


def _is_alive(group: dist.ProcessGroup) -> bool:
    """Return True if torch still knows the group: a process may leave one training group and join another."""
    return group in dist.distributed_c10d._world.pg_map


def get_gloo_group() -> dist.ProcessGroup:
    """Return the gloo group of all ranks."""
    if "gloo" not in _GROUPS:
        raise ProcessError("The gloo group does not exist yet; call init_gloo_group() on every rank first.")
    return _GROUPS["gloo"]


def gather_objects(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """All-gather ``own`` over ``group`` (default: all ranks, over gloo); return the values in rank order."""
    group = init_gloo_group() if group is None else group
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def gather_on_first(own: Any) -> list[Any] | None:
    """Gather ``own`` on rank 0; return the values in rank order there, and None on other ranks.  Collective."""
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, everyone, dst=0, group=init_gloo_group())
    return everyone


def object_of_first(own: Any) -> Any:
    """Broadcast: return rank 0's ``own``.  Collective."""
    box = [own]
    dist.broadcast_object_list(box, src=0, group=init_gloo_group())
    return box[0]


@contextmanager
def nccl_errors_left_to_us() -> Iterator[None]:
    """Let the process survive broken broadcasts of groups created in the block."""
    before = env.get_str(NCCL_ERROR_HANDLING)
    env.export({NCCL_ERROR_HANDLING: "0"})
    try:
        yield
    finally:
        env.export({NCCL_ERROR_HANDLING: before}) if before else env.unset(NCCL_ERROR_HANDLING)
