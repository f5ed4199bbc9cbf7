"""Traces of load plans on disk: made once for a model, an engine's layout and a version of SGLang.

An engine whose first push has proved its plan against the model's own loader keeps the trace; the next one of the same
kind takes it, and lets that loader judge a sample of it.  The name of a file tells all that a trace depends on; its
first line is the digest of the rest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slime.backends.sglang_utils.load_follower import Fill, LoadTrace, Write
from slime.backends.sglang_utils.loader_report import rank_in_engine
from slime.utils import env
from slime.weights.manifest import Manifest
from slime.weights.tensor_slice import StridedCopy

logger = logging.getLogger(__name__)

FORMAT = 1
EVERY = 64
"""One tensor in so many is in the sample, beside the first and the last of its kind."""
_ADDRESS = re.compile(" at 0x[0-9a-f]+")
_NUMBER = re.compile(r"\d+")
_OF_ONE_START = re.compile("port|host|addr|path|name|seed|key|log|version|id$|url|token|trace|metrics|timeout|dir")
"""Settings of a server that change from start to start, and that no loader looks at."""


class StoredPlans:
    """The traces in a folder that are good for this engine.

    Args:
        folder: it need not exist.
        engine: what a trace depends on beside the model and the tensors: versions, rank, settings.
    """

    def __init__(self, folder: Path, engine: Any) -> None:
        self._folder, self._engine = folder, engine

    def find(self, model: nn.Module, manifest: Manifest) -> LoadTrace | None:
        """Return the trace of the model's loader on the tensors of ``manifest``; None when none is kept."""
        path = self._path(model, manifest)
        try:
            digest, _, text = path.read_text().partition("\n")
        except OSError:
            return None
        if digest != _digest(text):
            logger.warning("%s is damaged; the load plan is made anew", path)
            return None
        return _decode(json.loads(text), model, manifest)

    def keep(self, model: nn.Module, manifest: Manifest, trace: LoadTrace) -> None:
        """Write a trace that was proved; one that cannot be told in JSON, or that failed somewhere, is not kept."""
        content = _encode(trace, model, manifest)
        if content is None:
            return
        path = self._path(model, manifest)
        text = json.dumps(content, separators=(",", ":"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_text(f"{_digest(text)}\n{text}")
            unfinished.replace(path)
        except OSError as error:
            logger.warning("the load plan was not kept: %s", error)

    def forget(self, model: nn.Module, manifest: Manifest) -> None:
        """Remove a trace that is wrong."""
        self._path(model, manifest).unlink(missing_ok=True)

    def _path(self, model: nn.Module, manifest: Manifest) -> Path:
        memory = {name: number for number, names in enumerate(_by_memory(model).values()) for name in names}
        layout = [
            [name, memory[name], list(t.shape), list(t.stride()), int(t.storage_offset()), str(t.dtype)]
            for name, t in _tensors(model)
        ]
        tensors = [[[t.name, t.shape, t.dtype] for t in listed] for listed in (manifest.tensors, manifest.kept)]
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        return self._folder / f"{_digest(json.dumps([FORMAT, kind, layout, tensors, self._engine]))}.json"


def stored_plans() -> StoredPlans:
    """Return the plans of this rank of the engine."""
    import sglang
    from sglang.srt.server_args import get_global_server_args

    settings = {
        name: _ADDRESS.sub("", repr(value))
        for name, value in sorted(vars(get_global_server_args()).items())
        if not _OF_ONE_START.search(name)
    }
    return StoredPlans(
        env.cache_dir() / "load_plans", [rank_in_engine(), sglang.__version__, torch.__version__, settings]
    )


def sample(names: Iterable[str]) -> set[str]:
    """Return some of the names: the first and last of each kind (names that differ in numbers), and every 64th."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(names):
        kinds.setdefault(_NUMBER.sub("0", name), []).append(name)
    return {name for kind in kinds.values() for name in (*kind[::EVERY], kind[-1])}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _by_memory(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of the tensors in each storage, by its address."""
    found: dict[int, list[str]] = {}
    for name, tensor in _tensors(model):
        found.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return found


class _Unkept(Exception):
    """The trace points to something that has no name, or holds values of the model."""


def _encode(trace: LoadTrace, model: nn.Module, manifest: Manifest) -> dict[str, Any] | None:
    if trace.unknown or trace.failures:
        return None
    owners = {address: names[0] for address, names in _by_memory(model).items()}
    positions = {entry.name: index for index, entry in enumerate((*manifest.tensors, *manifest.kept))}

    def place(target: Tensor) -> list[Any]:
        owner = owners.get(target.untyped_storage().data_ptr())
        if owner is None:
            raise _Unkept
        view = [int(target.storage_offset()), list(target.shape), list(target.stride())]
        return [owner, _name_of(target.dtype), *view]

    def value(fill: Fill) -> list[Any]:
        if fill.value.numel() != 1:
            raise _Unkept
        return [fill.value.item(), _name_of(fill.value.dtype), list(fill.value.shape)]

    try:
        return {
            "writes": [
                [positions[w.name], place(w.target), _name_of(w.source_dtype), dataclasses.astuple(w.copy)]
                for w in trace.writes
            ],
            "fills": [[place(fill.target), value(fill)] for fill in trace.fills],
            "opaque": trace.opaque,
            "opaque_targets": [place(target) for target in trace.opaque_targets],
            "has_lost_targets": trace.has_lost_targets,
            "partners": [sorted(names) for names in trace.partners],
            "derived_from": [owners[address] for address in trace.derived_from],
        }
    except (_Unkept, KeyError):
        return None


def _decode(content: dict[str, Any], model: nn.Module, manifest: Manifest) -> LoadTrace:
    memory = {name: tensor.detach().untyped_storage() for name, tensor in _tensors(model)}
    device = next(model.parameters()).device
    names = [entry.name for entry in (*manifest.tensors, *manifest.kept)]
    bases: dict[tuple[str, str], Tensor] = {}

    def base(owner: str, dtype: str) -> Tensor:
        if (owner, dtype) not in bases:
            empty = torch.empty(0, dtype=getattr(torch, dtype), device=device)
            bases[owner, dtype] = empty.set_(memory[owner], 0, (), ())
        return bases[owner, dtype]

    def tensor(owner: str, dtype: str, offset: int, shape: list[int], strides: list[int]) -> Tensor:
        return base(owner, dtype).as_strided(shape, strides, offset)

    def copy(shape: list[int], to: int, to_strides: list[int], frm: int, from_strides: list[int]) -> StridedCopy:
        return StridedCopy(tuple(shape), to, tuple(to_strides), frm, tuple(from_strides))

    dtype_of: Callable[[str], torch.dtype] = lambda name: getattr(torch, name)  # noqa: E731
    return LoadTrace(
        writes=[
            Write(names[position], base(*place[:2]), copy(*moved), dtype_of(dtype))
            for position, place, dtype, moved in content["writes"]
        ],
        fills=[
            Fill(tensor(*place), torch.tensor(value, dtype=dtype_of(dtype)).reshape(shape))
            for place, (value, dtype, shape) in content["fills"]
        ],
        opaque=content["opaque"],
        opaque_targets=[tensor(*place) for place in content["opaque_targets"]],
        has_lost_targets=content["has_lost_targets"],
        partners=[frozenset(names) for names in content["partners"]],
        derived_from={memory[owner].data_ptr() for owner in content["derived_from"]},
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
