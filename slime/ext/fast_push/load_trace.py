"""Traces a model's own loader: records the writes it would do, without weights.

The loader runs once on tensors of the meta device, which have shapes and strides but no memory, while a
:class:`Follower` watches every operation.

Views of a meta tensor keep their offset and strides, so the source of a ``copy_`` into a parameter tells which
elements of which tensor go where.  Copies are recorded but not executed; intermediate concatenations, packed copies
and casts are followed; anything computed from a tensor in another way is *opaque*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slime.ext.fast_push.manifest import TensorEntry
from slime.ext.fast_push.strided_copy import NotRectangularError, StridedCopy, StridedSlice, clip, slice_written

aten = torch.ops.aten

META = torch.device("meta")
_COPIES = {aten._to_copy, aten.clone}
"""Operations that return the values of their first argument, possibly in another dtype."""
_JOINS = {aten.cat, aten.stack}
_SHAPES = {aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_empty, aten.new_zeros}
"""Operations that depend only on a tensor's shape."""
_READS = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.is_nonzero}

_WITHOUT_VALUES = ("meta", "unallocated storage", "set_data")
"""Text in torch's errors about tensors without memory."""


class UntraceableError(Exception):
    """The loader asks for a tensor's values, which do not exist during a trace."""


@dataclass(frozen=True)
class Write:
    """One ``copy_`` of elements of a tensor into memory of the model."""

    name: str
    """Name of the HF tensor that it reads."""
    target: Tensor
    """A scalar view of the start of the written storage; the copy's ``to`` offset and strides are relative to it."""
    copy: StridedCopy
    source_dtype: torch.dtype


@dataclass(frozen=True)
class Fill:
    """Elements that the loader sets to a constant, such as vocabulary padding."""

    target: Tensor
    value: Tensor
    """Has the shape of ``target``, or one element."""


@dataclass
class LoadTrace:
    """The writes that ``load_weights`` would do."""

    writes: list[Write] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)
    """Tensor that only the model's own loader can load -> reason."""
    opaque_targets: list[Tensor] = field(default_factory=list)
    """Parameters or buffers that opaque tensors are written to."""
    has_lost_targets: bool = False
    """True if an opaque tensor ended its run with an error, so that its target is unknown."""
    failures: dict[str, str] = field(default_factory=dict)
    """Tensor that the loader refuses -> its error."""
    partners: list[frozenset[str]] = field(default_factory=list)
    """Sets of tensors that must be loaded together."""
    derived_from: set[int] = field(default_factory=set)
    """Addresses of parameter storages from which the loader derives other values."""
    is_concluded: bool = False
    """True if the loader ran only on some layers and the others were inferred."""
    unknown: str = ""
    """Why the whole trace is unreliable; empty if it is reliable."""


@dataclass
class _Source:
    """The source of some elements of a temporary tensor."""

    name: str
    copy: StridedCopy
    """Copy from the HF tensor into the temporary one."""
    dtype: torch.dtype
    """dtype of the HF tensor, as it was read."""


@dataclass
class _Origin:
    """The sources of the elements of one meta storage."""

    name: str = ""
    """Name, if the storage is an HF tensor itself."""
    dtype: torch.dtype | None = None
    whole: StridedSlice | None = None
    """Its memory layout."""
    parts: list[_Source] = field(default_factory=list)
    opaque: frozenset[str] = frozenset()
    """Names of tensors that it was computed from in a way that is not followed."""
    made_with: frozenset[str] = frozenset()
    """Names of tensors used to make it, even if none of their elements are left."""

    @property
    def names(self) -> frozenset[str]:
        own = {self.name} if self.name else set()
        return self.opaque | own | {part.name for part in self.parts} | self.made_with


class Follower(TorchDispatchMode):
    """Follows one run of a loader, operation by operation, and records it in a trace."""

    def __init__(self, model: nn.Module, trace: LoadTrace) -> None:
        super().__init__()
        self.trace = trace
        self.names_seen: set[str] = set()
        """Tensors that were written somewhere."""
        self._origins: dict[int, _Origin] = {}
        self._alive: list[Any] = []
        """Keeps storages alive whose addresses are keys of ``_origins``: a freed address could be reused."""
        self._buffers = {_storage(tensor) for tensor in model.buffers()}
        self._owned = self._buffers | {_storage(tensor) for tensor in model.parameters()}

    def source(self, entry: TensorEntry) -> Tensor:
        tensor = torch.empty(entry.shape, dtype=entry.torch_dtype, device=META)
        self._remember(tensor, _Origin(entry.name, tensor.dtype, StridedSlice.whole(entry.shape)))
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet, tensors = func.overloadpacket, _tensors((args, kwargs))
        if not any(tensor.device == META for tensor in tensors):
            return self._on_model_memory(func, args, kwargs, tensors)
        if packet in _READS:
            raise UntraceableError("the loader reads the tensor's values")
        if packet is aten.copy_:
            return self._copy(args[0], args[1])
        if func._schema.is_mutable and args[0].device != META:
            self._write_opaque(args[0], self._names(tensors), f"the loader uses {packet}")
            return args[0]
        result = func(*_on_meta(args), **_on_meta(kwargs))
        if func._schema.is_mutable:
            self._mark_opaque([args[0]], tensors)
        elif packet in _COPIES:
            self._follow_copy(result, args[0])
        elif packet in _JOINS:
            self._follow_join(packet, result, args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0))
        else:
            self._mark_opaque(_fresh(result, tensors), tensors)
        return result

    # --- memory of the model --------------------------------------------------------------------------------------

    def _on_model_memory(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Execute an operation that has no meta tensors, unless it would change a parameter."""
        names, packet = self._names(tensors), func.overloadpacket
        out = kwargs.get("out")
        if isinstance(out, Tensor) and not names and _storage(out) in self._buffers:
            # A buffer derived from a parameter, such as 1 + weight; whoever writes the parameter must recompute it.
            self._note_derived([tensor for tensor in tensors if tensor is not out])
            return out
        if func._schema.is_mutable and args and isinstance(args[0], Tensor):
            target = args[0]
            if names:
                self._write_opaque(target, names, "it passes through memory that is not a parameter")
                return target
            if _storage(target) in self._owned:
                self._fill(packet, target, args)
                self._note_derived([tensor for tensor in tensors if tensor is not target])
                return target
        result = func(*args, **kwargs)
        fresh = _fresh(result, tensors)
        if names:
            self._mark_opaque(fresh, tensors)
        if (fresh and packet not in _SHAPES) or func._schema.is_mutable:
            self._note_derived(tensors)
        return result

    def _note_derived(self, sources: list[Tensor]) -> None:
        own = [tensor for tensor in sources if _storage(tensor) in self._owned]
        self.trace.derived_from |= {tensor.untyped_storage().data_ptr() for tensor in own}

    def _fill(self, packet: Any, target: Tensor, args: Any) -> None:
        if packet is aten.zero_:
            value = torch.zeros((), dtype=target.dtype)
        elif packet is aten.fill_:
            value = torch.as_tensor(args[1], dtype=target.dtype)
        elif packet is aten.copy_:
            value = args[1].detach().to(target.dtype).clone()
        else:
            self.trace.unknown = self.trace.unknown or f"the model's loader changes parameters by {packet}"
            return
        if target.numel():
            self.trace.fills.append(Fill(target.detach(), value))

    def _copy(self, target: Tensor, source: Tensor) -> Tensor:
        if target.numel() == 0:
            return target
        if source.device != META:  # into a temporary tensor
            self._mark_opaque([target], [target])
            return target
        try:
            source = source.expand(target.shape)
        except RuntimeError as error:
            raise ValueError(f"{list(source.shape)} does not fit into {list(target.shape)}") from error
        copy = _whole_copy(target, source)
        origin = self._origin_of(source)
        if target.device == META:
            self._fill_temporary(target, copy, origin, source)
            return target
        parts = self._parts(origin, copy, source, target.dtype)
        if parts is None:
            self._write_opaque(target, origin.names, "it is computed from the tensor's values")
            return target
        if _storage(target) not in self._owned:
            self._write_opaque(target, origin.names, "it is written to memory that is not a parameter")
            return target
        base = target.detach().as_strided((), (), 0)
        for part in parts:
            self.names_seen.add(part.name)
            self.trace.writes.append(Write(part.name, base, part.copy, part.dtype))
        if origin.parts:
            self._join_names(origin.names)
        return target

    def _write_opaque(self, target: Tensor, names: frozenset[str], reason: str) -> None:
        if _storage(target) in self._owned:
            self.trace.opaque_targets.append(target.detach())
        else:
            self._remember(target, _Origin(opaque=names | self._origin_of(target).names))
        if not names:
            self.trace.unknown = self.trace.unknown or "the model's loader writes something of unknown origin"
        for name in names:
            self.trace.opaque.setdefault(name, reason)
            self.names_seen.add(name)
        self._join_names(names)

    def _join_names(self, names: frozenset[str]) -> None:
        if len(names) > 1 and names not in self.trace.partners:
            self.trace.partners.append(names)

    # --- temporary tensors ----------------------------------------------------------------------------------------

    def _parts(
        self, origin: _Origin, copy: StridedCopy, source: Tensor, target_dtype: torch.dtype
    ) -> list[_Source] | None:
        """Express the copy as copies from HF tensors; None if that is impossible."""
        if origin.opaque or origin.whole is None or origin.dtype is None:
            return None
        if source.dtype.itemsize != origin.dtype.itemsize:
            return None  # reinterpreted with another element width
        if origin.name:
            return [_Source(origin.name, copy, source.dtype)]
        parts, count = [], 0
        for part in origin.parts:
            if source.dtype != origin.dtype and part.dtype != origin.dtype:
                return None  # reinterprets the bits of cast values
            if source.dtype == origin.dtype and not _casts_alike(part.dtype, source.dtype, target_dtype):
                return None
            try:
                held = slice_written(part.copy, origin.whole)
                clipped = clip(copy, origin.whole, held)
            except NotRectangularError:
                return None
            dtype = part.dtype if source.dtype == origin.dtype else source.dtype
            parts += [_Source(part.name, one, dtype) for one in clipped]
            count += sum(one.num_elements for one in clipped)
        return parts if count == copy.num_elements else None

    def _fill_temporary(self, target: Tensor, copy: StridedCopy, origin: _Origin, source: Tensor) -> None:
        parts, held = self._parts(origin, copy, source, target.dtype), self._origin_of(target)
        if parts is None or held.names or target.numel() * target.element_size() != target.untyped_storage().nbytes():
            self._remember(target, _Origin(opaque=held.names | origin.names))
        else:
            whole = StridedSlice.whole(target.shape, target.stride())
            self._remember(target, _Origin("", target.dtype, whole, parts, made_with=origin.names))

    def _follow_copy(self, result: Tensor, source: Tensor) -> None:
        if source.device != META:  # copies real values to a device that is meta during the trace
            self._mark_opaque([result], [source])
        elif _storage(result) != _storage(source):
            self._fill_temporary(result, _whole_copy(result, source), self._origin_of(source), source)

    def _follow_join(self, packet: Any, result: Tensor, sources: list[Tensor], dim: int) -> None:
        if any(source.device != META for source in sources):
            self._mark_opaque([result], sources)
            return
        whole = StridedSlice.whole(result.shape, result.stride())
        origin, start = _Origin("", result.dtype, whole, made_with=self._names(sources)), 0
        for index, source in enumerate(sources):
            if packet is aten.stack:
                place = result.select(dim, index)
            elif source.numel() == 0:
                continue
            else:
                place = result.narrow(dim, start, source.shape[dim])
                start += source.shape[dim]
            parts = self._parts(self._origin_of(source), _whole_copy(place, source), source, result.dtype)
            if parts is None or source.dtype != result.dtype:
                self._mark_opaque([result], sources)
                return
            origin.parts += parts
        self._remember(result, origin)

    def _mark_opaque(self, results: list[Tensor], inputs: list[Tensor]) -> None:
        for result in results:
            held = self._origin_of(result)
            self._remember(result, _Origin(opaque=self._names(inputs) | held.names))

    def _origin_of(self, tensor: Tensor) -> _Origin:
        return self._origins.get(_storage(tensor), _Origin())

    def _names(self, tensors: list[Tensor]) -> frozenset[str]:
        return frozenset().union(*(self._origin_of(tensor).names for tensor in tensors))

    def _remember(self, tensor: Tensor, origin: _Origin) -> None:
        self._alive.append(tensor)
        self._origins[_storage(tensor)] = origin


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _fresh(result: Any, inputs: list[Tensor]) -> list[Tensor]:
    known = {_storage(tensor) for tensor in inputs}
    return [tensor for tensor in _tensors(result) if _storage(tensor) not in known]


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors among arguments or results; operators nest only lists, so the slow pytree is not needed."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [tensor for leaf in tree for tensor in _tensors(leaf)]


def _on_meta(tree: Any) -> Any:
    if isinstance(tree, torch.device):
        return META
    if isinstance(tree, Tensor):
        if tree.device == META:
            return tree
        return torch.empty_strided(tree.shape, tree.stride(), dtype=tree.dtype, device=META)
    if isinstance(tree, dict):
        return {name: _on_meta(leaf) for name, leaf in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_on_meta(leaf) for leaf in tree)
    return tree


def _whole_copy(target: Tensor, source: Tensor) -> StridedCopy:
    to_offset, from_offset = int(target.storage_offset()), int(source.storage_offset())
    return StridedCopy(tuple(target.shape), to_offset, target.stride(), from_offset, source.stride())


def _casts_alike(first: torch.dtype, middle: torch.dtype, last: torch.dtype) -> bool:
    """Return True if casting by way of ``middle`` gives the same values as a direct cast."""
    return first == middle or middle == last or _holds_all_of(middle, first)


def _holds_all_of(wide: torch.dtype, narrow: torch.dtype) -> bool:
    if not (wide.is_floating_point and narrow.is_floating_point):
        return False
    big, small = torch.finfo(wide), torch.finfo(narrow)
    return big.eps <= small.eps and big.max >= small.max and big.smallest_normal <= small.smallest_normal


# --- the run of the loader ----------------------------------------------------------------------------------------


def trace_load(model: nn.Module, entries: Iterable[TensorEntry]) -> LoadTrace:
    """Trace ``model.load_weights`` on tensors without memory, and restore the model.

    A tensor that the loader refuses without memory is retried with real zeros, and these stay in the model.
    """
    trace = LoadTrace()
    waiting = entries = list(entries)
    parameters = dict(model.named_parameters())
    kept = {name: (parameter, parameter.data) for name, parameter in parameters.items()}
    while waiting:
        follower = Follower(model, trace)
        feed = _Feed(waiting, follower)
        try:
            with torch.no_grad(), follower:
                model.load_weights(iter(feed))  # type: ignore[operator]
        except Exception as error:  # any error that a loader raises for a tensor is recorded in the trace
            if not feed.is_exhausted:
                _blame(trace, feed.current, error)
            # Tensors before the culprit are not fed again, unless they still wait for a partner.
            done = follower.names_seen | {feed.current}
            waiting = [entry for entry in waiting if entry.name not in done]
            if feed.is_exhausted or not feed.current:
                trace.unknown = f"the model's loader fails, but not on a particular tensor: {_words(error)}"
                break
        else:
            break
    after = dict(model.named_parameters())
    if after.keys() != kept.keys() or any(after[name] is not parameter for name, (parameter, _) in kept.items()):
        trace.unknown = trace.unknown or "the model's loader replaces parameters"
    for parameter, data in kept.values():
        if parameter.device == META and data.device != META:
            trace.unknown = trace.unknown or "the model's loader replaces the memory of parameters"
            parameter.data = data
    by_name = {entry.name: entry for entry in entries}
    for name in list(trace.failures):
        _try_with_memory(model, trace, by_name[name])
    trace.writes = _without_repetitions(trace.writes)
    return trace


def _without_repetitions(writes: Iterable[Write]) -> list[Write]:
    """Drop repeated writes of the same elements to the same place, as loaders do with a tied embedding."""
    return list({(w.name, w.target.untyped_storage().data_ptr(), w.copy): w for w in writes}.values())


def _try_with_memory(model: nn.Module, trace: LoadTrace, entry: TensorEntry) -> None:
    """Load real zeros for a tensor whose trace failed, because loaders with kernels accept nothing else."""
    zeros = torch.zeros(entry.shape, dtype=entry.torch_dtype, device=next(model.parameters()).device)
    try:
        with torch.no_grad():
            model.load_weights([(entry.name, zeros)])  # type: ignore[operator]
    except Exception as error:  # as above
        trace.failures[entry.name] = _words(error)
    else:
        trace.opaque[entry.name] = trace.failures.pop(entry.name)
        trace.has_lost_targets = True


class _Feed:
    """The named tensors that a loader iterates over; remembers the current one."""

    def __init__(self, entries: list[TensorEntry], follower: Follower) -> None:
        self._entries, self._follower = entries, follower
        self.current = ""
        self.is_exhausted = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for entry in self._entries:
            self.current = entry.name
            yield entry.name, self._follower.source(entry)
        self.is_exhausted = True


def _blame(trace: LoadTrace, name: str, error: Exception) -> None:
    """Record an exception as the tensor's failure, or as opaque if the tensor merely has no values."""
    lacks_values = isinstance(error, (UntraceableError, NotImplementedError, TypeError))
    if lacks_values or any(words in str(error) for words in _WITHOUT_VALUES):
        trace.opaque.setdefault(name, _words(error))
        trace.has_lost_targets = True
    else:
        trace.failures.setdefault(name, _words(error))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip(": ")
