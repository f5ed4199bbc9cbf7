"""A trace of a model's own loader: the writes that it would do, recorded without weights.

The loader runs once on tensors of the meta device, which have shapes and strides but no memory, while a
``load_follower.Follower`` watches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from slime.ext.fast_push.load_follower import META, Follower, LoadTrace, UntraceableError, Write
from slime.weights.manifest import TensorEntry

_WITHOUT_VALUES = ("meta", "unallocated storage", "set_data")
"""Words of torch's errors for tensors without memory."""


def trace_load(model: nn.Module, entries: Iterable[TensorEntry]) -> LoadTrace:
    """Run ``model.load_weights`` on tensors without memory, and restore the model.

    Only a tensor that the loader refuses without memory is tried again with zeros, which stay in the model.
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
        except Exception as error:  # whatever a loader raises for a tensor; becomes its entry in the trace
            if not feed.is_exhausted:
                _blame(trace, feed.current, error)
            # What came before the culprit need not come again, unless it still waited for a partner.
            done = follower.names_seen | {feed.current}
            waiting = [entry for entry in waiting if entry.name not in done]
            if feed.is_exhausted or not feed.current:
                trace.unknown = f"the model's loader fails for no tensor in particular: {_words(error)}"
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
    """Leave out repeated writes of the same elements to the same place: loaders do so with a tied embedding."""
    return list({(w.name, w.target.untyped_storage().data_ptr(), w.copy): w for w in writes}.values())


def _try_with_memory(model: nn.Module, trace: LoadTrace, entry: TensorEntry) -> None:
    """Load zeros of real memory where the trace failed: loaders with kernels, for one, accept nothing else."""
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
    """The named tensors that a loader iterates over; remembers where it is."""

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
    """Blame the tensor for an exception, unless it only comes from the tensor having no values."""
    lacks_values = isinstance(error, (UntraceableError, NotImplementedError, TypeError))
    if lacks_values or any(words in str(error) for words in _WITHOUT_VALUES):
        trace.opaque.setdefault(name, _words(error))
        trace.has_lost_targets = True
    else:
        trace.failures.setdefault(name, _words(error))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip(": ")
