"""Frees a trainer's accelerator memory while it sleeps, and restores it.

    gradients                       freed: a step begins with zeroed gradients
    weights that have a host copy   freed, and copied back from it (``policies.ModelSwitch``)
    everything else                 copied to the host: master weights, moments, a critic's weights

Storages are resized to 0 and get new memory later; tensors and their views stay the same objects.  Meanwhile nothing
may read them, and torch cannot make new views of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor, UntypedStorage

from slime.backends.megatron_utils import memory, reloadable_groups
from slime.backends.megatron_utils.adam import parts_of
from slime.backends.megatron_utils.policies import ModelSwitch
from slime.observability.telemetry import span
from slime.weights.pinned_memory import aligned, host_bytes

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**30
"""Bytes per chunk of pinned memory.  In chunks, the arena grows (once moments exist) without pinning memory again."""

HostCopy = tuple[Tensor, Tensor]
"""A live tensor, and the host tensor with the same values."""
Storages = dict[int, UntypedStorage]
"""By address."""


class HostArena:
    """Host memory in chunks of equal size, which are never freed.  Data may span chunks.

    Args:
        chunk_bytes: size of a chunk.
        is_pinned: pin the memory, so that copies from and to an accelerator are asynchronous.
    """

    def __init__(self, chunk_bytes: int, *, is_pinned: bool) -> None:
        self._chunk_bytes, self._is_pinned = chunk_bytes, is_pinned
        self.chunks: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        return len(self.chunks) * self._chunk_bytes

    def grow(self, num_bytes: int) -> None:
        while self.num_bytes < num_bytes:
            self.chunks.append(host_bytes(self._chunk_bytes, is_pinned=self._is_pinned))

    def pieces(self, begin: int, num_bytes: int) -> Iterator[Tensor]:
        """Yield the slices of chunks that hold these bytes."""
        end = begin + num_bytes
        while begin < end:
            index, first = divmod(begin, self._chunk_bytes)
            last = min(self._chunk_bytes, first + end - begin)
            yield self.chunks[index][first:last]
            begin += last - first


@dataclass
class _Released:
    """The storages that :meth:`OffloadedState.offload` released, by how their values are restored."""

    on_host: list[tuple[UntypedStorage, int, int]] = field(default_factory=list)
    """Copied to the arena: storage, its bytes, and their offset in the arena."""
    zeroed: list[tuple[UntypedStorage, int]] = field(default_factory=list)
    """Not copied, zeroed on return: storage and its bytes."""
    copies: list[HostCopy] = field(default_factory=list)
    """Host copies of tensors in ``zeroed`` storages."""

    @property
    def host_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes, _ in self.on_host)

    @property
    def freed_bytes(self) -> int:
        """Bytes freed without a copy to the arena."""
        return sum(num_bytes for _, num_bytes in self.zeroed)


class OffloadedState:
    """Offloads the device memory of a model and its optimizer, and restores it.

    Between :meth:`offload` and :meth:`onload` nothing may read or write it.  Tensors are looked up at each call,
    because moments appear with the first step.

    Args:
        chunk_bytes: size of the chunks of host memory, which are allocated when first needed and kept.
    """

    def __init__(self, model: Sequence[torch.nn.Module], optimizer: Any, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._model, self._optimizer = model, optimizer
        self._device = next(model[0].parameters()).device
        self.arena = HostArena(chunk_bytes, is_pinned=self._device.type == "cuda")
        self._released: _Released | None = None
        self._logged_chunks = -1

    @torch.no_grad()
    def offload(self, copies: Sequence[HostCopy] = ()) -> None:
        """Free the device memory, unless it is freed already.

        Args:
            copies: up-to-date host copies of tensors of the model, which must stay so until :meth:`onload`.
        """
        if self._released is not None:
            return
        self._synchronize()  # other streams may still be writing
        released = self._plan(copies)
        for storage, num_bytes, begin in released.on_host:
            for piece, part in self._pairs(storage, begin, num_bytes):
                piece.copy_(part, non_blocking=True)
        self._synchronize()  # freed memory may be reused at once, so the copies must be complete
        for storage in [*(one for one, *_ in released.on_host), *(one for one, _ in released.zeroed)]:
            storage.resize_(0)
        self._released = released
        _forget_cached_results(self._model)
        memory.clear_memory()
        if len(self.arena.chunks) > self._logged_chunks:  # the first time, and once moments exist
            self._logged_chunks = len(self.arena.chunks)
            self._log(released)

    @torch.no_grad()
    def onload(self) -> None:
        """Allocate the memory again and restore its content, with zeroed gradients; do nothing if not offloaded."""
        if self._released is None:
            return
        released, self._released = self._released, None
        for storage, num_bytes in released.zeroed:
            storage.resize_(num_bytes)
            _bytes_of(storage).zero_()  # also the padding between weights
        for live, copy in released.copies:
            live.detach().copy_(copy, non_blocking=True)
        for storage, num_bytes, begin in released.on_host:
            storage.resize_(num_bytes)
            for piece, part in self._pairs(storage, begin, num_bytes):
                part.copy_(piece, non_blocking=True)
        self._synchronize()

    def _plan(self, copies: Sequence[HostCopy]) -> _Released:
        """Decide how to release each storage, and allocate host memory for those that are copied."""
        weights = [
            tensor for chunk in self._model for _, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
        ]
        buffers = [buffer for chunk in self._model for buffer in _gradient_buffers(chunk)]
        flat_weights = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
        kept = self._storages([*weights, *flat_weights, *_optimizer_tensors(self._optimizer)])
        gradients = self._storages(buffer.grad_data for buffer in buffers)
        # Other tensors in a storage of weights are the optimizer's views of these weights.
        copied = {id(live) for live, _ in copies}
        without_copy = self._storages(weight for weight in weights if id(weight) not in copied)
        from_copies = self._storages(live for live, _ in copies).keys() - without_copy.keys()
        released = _Released()
        begin = 0
        for address, storage in (kept | gradients).items():
            if address in from_copies or address not in kept:
                released.zeroed.append((storage, storage.nbytes()))
            else:
                released.on_host.append((storage, storage.nbytes(), begin))
                begin += aligned(storage.nbytes())
        released.copies = [pair for pair in copies if pair[0].untyped_storage().data_ptr() in from_copies]
        self.arena.grow(begin)
        return released

    def _storages(self, tensors: Iterable[Tensor]) -> Storages:
        """Return the distinct storages of the tensors that are on the device and in memory that torch allocated."""
        storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == self._device.type)
        return {one.data_ptr(): one for one in storages if one.nbytes() > 0 and one.resizable()}

    def _pairs(self, storage: UntypedStorage, begin: int, num_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield slices of the arena, each with the slice of the storage that it holds."""
        flat, done = _bytes_of(storage), 0
        for piece in self.arena.pieces(begin, num_bytes):
            yield piece, flat[done : done + piece.numel()]
            done += piece.numel()

    def _log(self, released: _Released) -> None:
        is_cuda = self._device.type == "cuda"
        left, reserved = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if is_cuda else (0, 0)
        logger.info(
            "Asleep: %.2f GiB moved to %.2f GiB of host memory, %.2f GiB freed; %.2f GiB stay "
            "allocated, %.2f GiB reserved.",
            *(n / 2**30 for n in (released.host_bytes, self.arena.num_bytes, released.freed_bytes, left, reserved)),
        )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class TrainerSleep:
    """Puts a trainer to sleep between its verbs, while engines use its accelerator.

    Invariant: after :meth:`wake_up` the model holds the role's own weights.

    Args:
        state: the memory to offload; None on a CPU, where a sleeping trainer keeps its memory.
        weights: the model's host copies.
        role: the tag of the role's own weights.
        always: fall asleep after every verb (``--offload-train``).
        mem_fraction_static: memory fraction of the engines; if they fit beside the trainer, it stays awake
            (``--offload-train-if-needed``).  None: it always sleeps.
    """

    def __init__(
        self,
        state: OffloadedState | None,
        weights: ModelSwitch,
        role: str,
        *,
        always: bool,
        mem_fraction_static: float | None,
    ) -> None:
        self._state, self._weights, self._role = state, weights, role
        self._always, self._mem_fraction_static = always, mem_fraction_static
        self.is_asleep = False

    def fall_asleep(self) -> None:
        """Free the memory, unless it is freed already or engines fit beside it.  Collective."""
        if self.is_asleep:
            return
        state = self._state
        if state is not None and self._mem_fraction_static is not None:
            if memory.has_room_for_engines(self._mem_fraction_static):
                return
        with span("sleep"):
            memory.report("awake")
            if state is not None:
                copies = self._weights.current_copies()
                reloadable_groups.release_communicators(meanwhile=lambda: state.offload(copies))
            memory.report("asleep")
        self.is_asleep = True

    def wake_up(self) -> None:
        """Restore the memory and the role's own weights."""
        if not self.is_asleep:
            return
        with span("wake_up"):
            if self._state is not None:
                self._state.onload()
        self.is_asleep = False
        self._weights.switch_to(self._role)

    def rest(self) -> None:
        """Fall asleep after a verb, with ``--offload-train``."""
        if self._always:
            self.fall_asleep()

    def host_weights(self) -> Mapping[str, Tensor] | None:
        """Return the actor's host copy while the model's memory is offloaded; None otherwise."""
        return self._weights.get("actor") if self.is_asleep and self._state is not None else None

    def end_push(self) -> None:
        """Free the communicators (if asleep) and cached memory that a push left."""
        if self.is_asleep:
            reloadable_groups.release_communicators()
        memory.empty_cache()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _gradient_buffers(chunk: torch.nn.Module) -> list[Any]:
    """Return the flat buffers of a chunk's weights and gradients, including those of experts."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers] if isinstance(chunk, DistributedDataParallel) else []


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Yield master weights and optimizer state, on any device."""
    for part in parts_of(optimizer) if optimizer is not None else ():
        inner = part.optimizer
        held = [inner]
        if isinstance(inner, HybridDeviceOptimizer):
            held += inner.sub_optimizers
            yield from inner.param_to_inner_param.values()
        for one in held:
            for group in one.param_groups:
                yield from group["params"]
            for state in one.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))


def _forget_cached_results(model: Sequence[torch.nn.Module]) -> None:
    """Clear the caches of forward methods (rotary angles): a small cached tensor pins its whole allocator block."""
    for kind in {type(module) for chunk in model for module in chunk.modules()}:
        forward: Any = kind.forward
        if hasattr(forward, "cache_clear"):
            forward.cache_clear()
