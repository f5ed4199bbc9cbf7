"""What a trainer holds on the accelerator, given back while it sleeps.

    gradients                       freed: a step begins with zeros in them
    weights that have a host copy   freed, and copied back from it (``policies.ModelSwitch``)
    everything else                 copied to the host: master weights, moments, a critic's weights

Storages lose their memory and get other memory later; tensors, and views of them, stay the objects that they are.
Meanwhile nothing may read them, and torch makes no new slices of them.
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
"""Of pinned memory: what is needed grows once there are moments, and nothing that is pinned shall be pinned again."""

HostCopy = tuple[Tensor, Tensor]
"""A live tensor, and the tensor on the host that has its values."""
Storages = dict[int, UntypedStorage]
"""By address."""


class HostArena:
    """Host memory in chunks of one size, which is kept; what lies in it may span chunks.

    Args:
        chunk_bytes: of a chunk.
        is_pinned: a copy from or to an accelerator then runs behind the caller's back.
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
        """Yield the parts of chunks in which these bytes lie."""
        end = begin + num_bytes
        while begin < end:
            index, first = divmod(begin, self._chunk_bytes)
            last = min(self._chunk_bytes, first + end - begin)
            yield self.chunks[index][first:last]
            begin += last - first


@dataclass
class _Released:
    """What :meth:`OffloadedState.offload` has released, by what gives it back its values."""

    on_host: list[tuple[UntypedStorage, int, int]] = field(default_factory=list)
    """Storage, its bytes, and where they begin in the arena."""
    zeroed: list[tuple[UntypedStorage, int]] = field(default_factory=list)
    """Storage and its bytes."""
    copies: list[HostCopy] = field(default_factory=list)
    """Of tensors that lie in the ``zeroed``."""

    @property
    def host_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes, _ in self.on_host)

    @property
    def freed_bytes(self) -> int:
        """Bytes that nobody copied."""
        return sum(num_bytes for _, num_bytes in self.zeroed)


class OffloadedState:
    """The memory of a model and its optimizer on their device, which can be given back for a while.

    Between :meth:`offload` and :meth:`onload` nothing reads or writes it.  What is there is looked up each time:
    moments appear with the first step.

    Args:
        chunk_bytes: of the host's memory, which is taken when first needed and kept.
    """

    def __init__(self, model: Sequence[torch.nn.Module], optimizer: Any, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._model, self._optimizer = model, optimizer
        self._device = next(model[0].parameters()).device
        self.arena = HostArena(chunk_bytes, is_pinned=self._device.type == "cuda")
        self._released: _Released | None = None
        self._logged_chunks = -1

    @torch.no_grad()
    def offload(self, copies: Sequence[HostCopy] = ()) -> None:
        """Give the memory back; does nothing when that is done.

        Args:
            copies: up-to-date host copies of tensors of the model, which are still so at :meth:`onload`.
        """
        if self._released is not None:
            return
        self._synchronize()  # streams other than this one
        released = self._plan(copies)
        for storage, num_bytes, begin in released.on_host:
            for piece, part in self._pairs(storage, begin, num_bytes):
                piece.copy_(part, non_blocking=True)
        self._synchronize()  # a storage's memory may be taken by others as soon as it is free
        for storage in [*(one for one, *_ in released.on_host), *(one for one, _ in released.zeroed)]:
            storage.resize_(0)
        self._released = released
        _forget_cached_results(self._model)
        memory.clear_memory()
        if len(self.arena.chunks) > self._logged_chunks:  # the first time, and when there are moments
            self._logged_chunks = len(self.arena.chunks)
            self._log(released)

    @torch.no_grad()
    def onload(self) -> None:
        """Take memory again and restore what was in it, zeros in gradients; does nothing when that is done."""
        if self._released is None:
            return
        released, self._released = self._released, None
        for storage, num_bytes in released.zeroed:
            storage.resize_(num_bytes)
            _bytes_of(storage).zero_()  # also what lies between weights
        for live, copy in released.copies:
            live.detach().copy_(copy, non_blocking=True)
        for storage, num_bytes, begin in released.on_host:
            storage.resize_(num_bytes)
            for piece, part in self._pairs(storage, begin, num_bytes):
                part.copy_(piece, non_blocking=True)
        self._synchronize()

    def _plan(self, copies: Sequence[HostCopy]) -> _Released:
        """Decide what becomes of each storage, and have room on the host for those that go there."""
        weights = [
            tensor for chunk in self._model for _, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
        ]
        buffers = [buffer for chunk in self._model for buffer in _gradient_buffers(chunk)]
        flat_weights = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
        kept = self._storages([*weights, *flat_weights, *_optimizer_tensors(self._optimizer)])
        gradients = self._storages(buffer.grad_data for buffer in buffers)
        # What else lies in a storage of weights is the optimizer's: views of these weights.
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
        """Return the distinct storages of those tensors that lie on the device, and in memory of torch's own."""
        storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == self._device.type)
        return {one.data_ptr(): one for one in storages if one.nbytes() > 0 and one.resizable()}

    def _pairs(self, storage: UntypedStorage, begin: int, num_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of the arena, with the part of the storage that each of them holds."""
        flat, done = _bytes_of(storage), 0
        for piece in self.arena.pieces(begin, num_bytes):
            yield piece, flat[done : done + piece.numel()]
            done += piece.numel()

    def _log(self, released: _Released) -> None:
        is_cuda = self._device.type == "cuda"
        left, reserved = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if is_cuda else (0, 0)
        logger.info(
            "Asleep: %.2f GiB lie in %.2f GiB of host memory, %.2f GiB are freed; %.2f GiB stay "
            "allocated, %.2f GiB reserved.",
            *(n / 2**30 for n in (released.host_bytes, self.arena.num_bytes, released.freed_bytes, left, reserved)),
        )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class TrainerSleep:
    """Whether a trainer sleeps, which it may between its verbs, while engines have its accelerator.

    Invariant: awake, the model holds the role's own weights.

    Args:
        state: what is given back; None on a CPU, where a trainer sleeps and keeps its memory.
        weights: the model's host copies.
        role: the tag of the role's own weights.
        always: fall asleep after every verb (``--offload-train``).
        mem_fraction_static: of engines; a trainer beside which they have room stays awake
            (``--offload-train-if-needed``).  None: it sleeps in any case.
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
        """Free the memory, unless that is done already or need not be.  Collective."""
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
        """Restore the memory, with the role's own weights in it."""
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
        """Return the host copy of the actor where the model's own memory is given back."""
        return self._weights.get("actor") if self.is_asleep and self._state is not None else None

    def end_push(self) -> None:
        """Free what a push took beside its buffers."""
        if self.is_asleep:
            reloadable_groups.release_communicators()
        memory.empty_cache()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _gradient_buffers(chunk: torch.nn.Module) -> list[Any]:
    """Return the flat buffers of a chunk's weights and gradients, also those of experts."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers] if isinstance(chunk, DistributedDataParallel) else []


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Yield master weights and what is kept of each, wherever they lie."""
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
    """Empty the caches of forward methods (rotary angles): a small tensor keeps the large block that it lies in."""
    for kind in {type(module) for chunk in model for module in chunk.modules()}:
        forward: Any = kind.forward
        if hasattr(forward, "cache_clear"):
            forward.cache_clear()
