"""Process groups whose communicators can be released while the trainer sleeps.

A NCCL communicator holds 0.5 GiB or more of GPU memory until its process group is destroyed, but megatron-core, the
model, the gradient buffers and the optimizer all keep references to their groups.  They therefore get proxies:
:class:`ReloadableProcessGroup` forwards every call to an inner group, which it can replace.

    make_groups_reloadable()          # after the parallel groups exist, before a model holds any
    ...
    release_communicators()           # no operation may be in flight; the next call of a group connects again
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d as c10d

logger = logging.getLogger(__name__)

_NOT_PASSED_ON = {"BackendType", "boxed", "unbox", "rank", "size", *dist.ProcessGroup.BackendType.__members__}


class ReloadableProcessGroup(dist.ProcessGroup):
    """A process group that replaces ``original`` in torch's tables.

    It supports all calls of a process group.  Callees that check for the exact class need :attr:`inner` instead: only
    for that class does ``torch.distributed.batch_isend_irecv`` batch its messages into one NCCL operation.
    """

    alive: weakref.WeakSet[ReloadableProcessGroup] = weakref.WeakSet()

    def __init__(self, original: dist.ProcessGroup) -> None:
        super().__init__(original.rank(), original.size())  # type: ignore[call-arg]  # an overload without a stub
        self.inner: dist.ProcessGroup = original
        """The group that currently runs the operations."""
        self._ranks = c10d._world.pg_group_ranks[original]
        self._name = original.group_name
        self._store = c10d._world.pg_map[original][1]
        self._generation = 0
        self._replace_in_tables(original)
        self.alive.add(self)

    def _replace_in_tables(self, original: dist.ProcessGroup) -> None:
        world = c10d._world
        tables: list[dict[dist.ProcessGroup, Any]] = [
            world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag
        ]  # fmt: skip
        for table in tables:
            if original in table:
                table[self] = table.pop(original)
        world.pg_group_ranks[self] = self._ranks  # the original stays here, for users of ``inner``
        for groups in world.tags_to_pg.values():
            groups[:] = [self if group is original else group for group in groups]
        if original is world.default_pg:
            c10d._update_default_pg(self)

    def exchange_inner(self) -> dist.ProcessGroup:
        """Replace the inner group with one that has no communicators; return the old one, which the caller shuts down.

        Collective over the group.  With gloo, which connects when a group is created, this waits for the other ranks.
        """
        old, self._generation = self.inner, self._generation + 1
        # Each generation has its own keys, so that no rank finds the address of a destroyed communicator.
        store = dist.PrefixStore(f"generation{self._generation}/", self._store)
        self.inner = _like(old, str(dist.get_backend(self)), store, self._name)
        c10d._world.pg_group_ranks[self.inner] = c10d._world.pg_group_ranks.pop(old)
        return old


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: ReloadableProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return method


def _passed_on_value(name: str) -> property:
    return property(lambda self: getattr(self.inner, name))


for _name in dir(dist.ProcessGroup):
    if _name.startswith("__") or _name.startswith("_pybind11") or _name in _NOT_PASSED_ON:
        continue
    _is_value = isinstance(getattr(dist.ProcessGroup, _name), property)
    setattr(ReloadableProcessGroup, _name, _passed_on_value(_name) if _is_value else _passed_on(_name))


def _like(group: dist.ProcessGroup, kind: str, store: dist.Store, name: c10d.GroupName) -> dist.ProcessGroup:
    """Create a group with the same ranks and options, without communicators."""
    made = dist.ProcessGroup(store, group.rank(), group.size())
    devices = list(group._device_types)
    old: Any = group._get_backend(devices[0])
    backend_store = dist.PrefixStore(f"{devices[0].type}/", store)
    if kind == "nccl":
        backend_type = dist.ProcessGroup.BackendType.NCCL
        backend: Any = c10d.ProcessGroupNCCL(backend_store, group.rank(), group.size(), old.options)
    else:
        backend_type = dist.ProcessGroup.BackendType.GLOO
        timeout = old.options._timeout
        backend = c10d.ProcessGroupGloo(backend_store, group.rank(), group.size(), timeout=timeout)
    made._set_default_backend(backend_type)
    backend._set_sequence_number_for_group()
    for device in devices:
        made._register_backend(device, backend_type, backend)
    made._set_group_name(name)
    return made


def make_groups_reloadable(backend: str = "nccl") -> int:
    """Replace the default group and all of megatron-core's groups over ``backend`` with reloadable ones.

    Call it on every rank, before anything keeps a reference to a group; a second call does nothing.

    Returns:
        the number of groups replaced.
    """
    made: dict[dist.ProcessGroup, ReloadableProcessGroup] = {}

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            value[:] = [replaced(item) for item in value]
            return value
        if type(value) is not dist.ProcessGroup:
            return value
        if value in c10d._world.pg_map and dist.get_backend(value) == backend:
            made[value] = ReloadableProcessGroup(value)  # replaces ``value`` in torch's tables
        return made.get(value, value)

    replaced(c10d._get_default_group())
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup | list):
            setattr(parallel_state, name, replaced(value))
    return len(made)


def release_communicators(meanwhile: Callable[[], None] | None = None) -> None:
    """Free the device memory of all reloadable groups' communicators; do nothing without such groups.

    Collective, with no operation in flight on any of the groups.  A communicator takes 15 to 500 ms to shut down, most
    of it waiting, so threads shut down all of them in parallel.

    Args:
        meanwhile: called during the shutdown; must not use any of the groups.
    """
    groups = sorted(ReloadableProcessGroup.alive, key=lambda group: c10d._world.pg_names.get(group, ""))
    device = None
    if groups and torch.cuda.is_available():
        torch.cuda.synchronize()
        device = torch.cuda.current_device()

    def shut_down(group: dist.ProcessGroup) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # per thread; the default device would get a CUDA context
        group.shutdown()

    old = [group.exchange_inner() for group in groups]
    with ThreadPoolExecutor(max(1, len(old)), thread_name_prefix="shutdown") as pool:
        ends = [pool.submit(shut_down, group) for group in old]
        if meanwhile is not None:
            meanwhile()
        for end in ends:
            end.result()


def plain_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group, or the inner one of a reloadable group, for callees that check for the exact class."""
    return group.inner if isinstance(group, ReloadableProcessGroup) else group
