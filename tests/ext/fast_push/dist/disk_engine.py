"""An engine that reads weights from disk, in the process of trainer rank 0: the verbs, a host's copy, and faults.

It holds the bytes of every pushed tensor, and acknowledges their digests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.utils.errors import EngineError, ProcessError, WeightSyncError
from slime.weights.digest import combine, digest_bytes
from slime.ext.fast_push.loaders import RECEIVER
from slime.ext.fast_push.disk.local_copy import LocalCopy, PullReport
from slime.ext.fast_push.manifest import Manifest
from slime.weights.stored_tensors import read_bytes, read_layout

NO_BYTES = np.empty(0, np.uint8)


@dataclass
class Done:
    """An answer that is available at once."""

    value: Any
    error: Exception | None

    def wait(self, timeout_s: float) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class DiskEngine:
    """The engine, as a push sees it.

    Args:
        index: index of the engine.
        local: the host's copy; None reads the shared folder.
        shared: the folder of versions.
        model: version 0.
    """

    num_gpus = 1
    gpu_offset = 0
    gpus = range(1)
    is_colocated = False
    dtype = ""

    def __init__(
        self, index: int, *, local: Path | None, shared: Path, model: Path, loaders: tuple[str, ...] = (RECEIVER,)
    ) -> None:
        self.index, self.loaders = index, loaders
        self._copy = local and LocalCopy(local, source=shared, model=model, timeout_s=5)
        self.held = {name: read_bytes(stored).tobytes() for name, stored in read_layout(model).items()}
        self.version = "default"
        self.is_paused = self.is_dead = False
        self.fault = ""
        """``"<kind> <verb>"``: refuses, dies (permanently), or flips (a bit of a held tensor)."""
        self.calls: list[str] = []
        self.pulls: list[PullReport] = []
        self.served: list[tuple[str, dict[str, bytes]]] = []
        self._push_id = ""
        self._is_acknowledged = False
        self._manifest: Manifest | None = None

    def run(self, function: Callable[..., Any], /, *arguments: Any, on_all_nodes: bool = False) -> Done:
        return getattr(self, function.__name__)(*arguments)

    def __getattr__(self, name: str) -> Callable[..., Done]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: Any, **keywords: Any) -> Done:
            self.calls.append(name)
            kind, _, verb = self.fault.partition(" ")
            if verb == name and kind == "dies":
                self.is_dead = True
            if self.is_dead:
                return Done(None, EngineError("the engine is dead"))
            if verb == name and kind == "refuses":
                return Done(None, EngineError("out of memory"))
            try:
                answer = getattr(self, f"_{name}")(*arguments, **keywords)
            except (WeightSyncError, ProcessError) as error:
                return Done(None, error)
            if verb == name and kind == "flips":
                first = next(iter(self.held))
                self.held[first] = bytes([self.held[first][0] ^ 1]) + self.held[first][1:]
            return Done(answer, None)

        return call

    def _pause_generation(self) -> None:
        self.is_paused = True

    def _flush_cache(self) -> None:
        pass

    def _continue_generation(self) -> None:
        assert not self._push_id, "an unfinished push must not be served"
        self.is_paused = False
        self.served.append((self.version, dict(self.held)))

    def _pull_weights(self, target_version: int, rebuild: bool = False) -> str:
        assert self._copy is not None
        self.pulls.append(self._copy.pull(target_version, rebuild=rebuild))
        return str(self._copy.folder)

    def _begin_weight_update(
        self, manifest_id: str, push_id: str, manifest_json: str | None = None, loader: str = RECEIVER
    ) -> Any:
        assert self.is_paused
        if manifest_json is not None:
            self._manifest = Manifest.from_json(manifest_json)
        self._push_id, self._is_acknowledged = push_id, False
        if self._manifest is None or self._manifest.id != manifest_id:
            return None
        return [""] * len(self._manifest.buckets)

    def _receive_weight_folder(self, push_id: str, folder: str) -> None:
        assert push_id == self._push_id
        assert self._manifest is not None
        layout = read_layout(folder)
        for tensor in self._manifest.tensors:
            assert layout[tensor.name].shape == tensor.shape
            self.held[tensor.name] = read_bytes(layout[tensor.name]).tobytes()

    def _update_weights_from_disk(self, model_path: str, weight_version: str) -> None:
        assert self.is_paused
        self.held |= {name: read_bytes(stored).tobytes() for name, stored in read_layout(model_path).items()}
        self.version = weight_version

    def _acknowledge_weight_update(self, push_id: str) -> dict[str, Any]:
        assert push_id == self._push_id
        assert self._manifest is not None
        buckets = []
        for bucket in self._manifest.buckets:
            sizes = {p.name: p.slice.num_elements for p in bucket.slices}
            assert all(sizes[p.name] == math.prod(self._manifest.by_name[p.name].shape) for p in bucket.slices)
            held = [
                torch.frombuffer(bytearray(self.held[p.name]) or NO_BYTES, dtype=torch.uint8) for p in bucket.slices
            ]
            buckets.append(f"{combine(digest_bytes(data) for data in held):016x}")
        self._is_acknowledged = True
        return {"push_id": push_id, "buckets": buckets, "problems": []}

    def _commit_weight_update(self, push_id: str, weight_version: str) -> None:
        assert push_id == self._push_id
        assert self._is_acknowledged
        self._push_id, self.version = "", weight_version

    def _get_weight_version(self) -> str:
        return self.version
