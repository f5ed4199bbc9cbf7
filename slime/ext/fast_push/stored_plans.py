"""Traces of load plans on disk: made once for a model, an engine's layout and a version of SGLang.

An engine whose first push has proved its plan against the model's own loader keeps the trace; the next one of the same
kind takes it, and lets that loader judge a sample of it.  The name of a file tells all that a trace depends on; its
first line is the digest of the rest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slime.backends.sglang_utils.loader_report import rank_in_engine
from slime.ext.fast_push.load_follower import Fill, LoadTrace, Write
from slime.ext.fast_push.model_memory import ModelMemory, named_tensors
from slime.utils import env
from slime.weights.columns import numbered
from slime.weights.manifest import Manifest
from slime.weights.named_tensors import dtype_name
from slime.weights.tensor_slice import StridedCopy

logger = logging.getLogger(__name__)

FORMAT = 3
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
        self._wrong: set[Path] = set()

    def find(self, model: nn.Module, manifest: Manifest) -> LoadTrace | None:
        """Return the trace of the model's loader on the tensors of ``manifest``; None when none is kept."""
        path = self._path(model, manifest)
        if path in self._wrong:
            return None
        try:
            digest, _, text = path.read_text(errors="replace").partition("\n")
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
        path = self._path(model, manifest)
        self._wrong.add(path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # the cache folder cannot be written
            logger.warning("a wrong load plan could not be removed; the next engine finds it out again: %s", error)

    def _path(self, model: nn.Module, manifest: Manifest) -> Path:
        _, memory = numbered(t.untyped_storage().data_ptr() for _, t in named_tensors(model))
        layout = [
            [name, storage, list(t.shape), list(t.stride()), int(t.storage_offset()), str(t.dtype)]
            for storage, (name, t) in zip(memory, named_tensors(model), strict=True)
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


class _Unkept(Exception):
    """The trace points to something that has no name, or holds values of the model."""


def _encode(trace: LoadTrace, model: nn.Module, manifest: Manifest) -> dict[str, Any] | None:
    """Return the trace in columns: layers and experts are alike, and have few copies and targets among them."""
    if trace.unknown or trace.failures:
        return None
    memory = ModelMemory(model)
    positions = {entry.name: index for index, entry in enumerate((*manifest.tensors, *manifest.kept))}

    def owner(address: int) -> str:
        name = memory.owner_of(address)
        if name is None:
            raise _Unkept
        return name

    def base(target: Tensor) -> tuple[str, str]:
        return owner(target.untyped_storage().data_ptr()), dtype_name(target.dtype)

    def view(target: Tensor) -> list[Any]:
        return [*base(target), int(target.storage_offset()), list(target.shape), list(target.stride())]

    def value(fill: Fill) -> list[Any]:
        if fill.value.numel() != 1:
            raise _Unkept
        return [fill.value.item(), dtype_name(fill.value.dtype), list(fill.value.shape)]

    try:
        targets, target_of = numbered(base(write.target) for write in trace.writes)
        copies, copy_of = numbered(write.copy for write in trace.writes)
        dtypes, dtype_of = numbered(dtype_name(write.source_dtype) for write in trace.writes)
        return {
            "targets": targets,
            "copies": [[c.shape, c.to_offset, c.to_strides, c.from_offset, c.from_strides] for c in copies],
            "dtypes": dtypes,
            "writes": [[positions[write.name] for write in trace.writes], target_of, copy_of, dtype_of],
            "fills": [[view(fill.target), value(fill)] for fill in trace.fills],
            "opaque": trace.opaque,
            "opaque_targets": [view(target) for target in trace.opaque_targets],
            "has_lost_targets": trace.has_lost_targets,
            "partners": [sorted(names) for names in trace.partners],
            "derived_from": [owner(address) for address in trace.derived_from],
        }
    except (_Unkept, KeyError):
        return None


def _decode(content: dict[str, Any], model: nn.Module, manifest: Manifest) -> LoadTrace:
    memory = ModelMemory(model)
    names = [entry.name for entry in (*manifest.tensors, *manifest.kept)]

    def dtype_of(name: str) -> torch.dtype:
        return getattr(torch, name)

    def view(owner: str, dtype: str, offset: int, shape: list[int], strides: list[int]) -> Tensor:
        return memory.base(owner, dtype_of(dtype)).as_strided(shape, strides, offset)

    targets = [memory.base(owner, dtype_of(dtype)) for owner, dtype in content["targets"]]
    copies = [
        StridedCopy(tuple(shape), to_offset, tuple(to_strides), from_offset, tuple(from_strides))
        for shape, to_offset, to_strides, from_offset, from_strides in content["copies"]
    ]
    dtypes = [dtype_of(name) for name in content["dtypes"]]
    return LoadTrace(
        writes=[
            Write(names[position], targets[target], copies[copy], dtypes[dtype])
            for position, target, copy, dtype in zip(*content["writes"], strict=True)
        ],
        fills=[
            Fill(view(*place), torch.tensor(value, dtype=dtype_of(dtype)).reshape(shape))
            for place, (value, dtype, shape) in content["fills"]
        ],
        opaque=content["opaque"],
        opaque_targets=[view(*place) for place in content["opaque_targets"]],
        has_lost_targets=content["has_lost_targets"],
        partners=[frozenset(names) for names in content["partners"]],
        derived_from={memory.address_of(owner) for owner in content["derived_from"]},
    )
