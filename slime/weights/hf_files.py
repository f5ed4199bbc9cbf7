"""Writes a model folder in Hugging Face's layout, shard by shard.

Host memory holds one shard, plus one per save worker; digests (``digests.json``) are computed there.  The folder
becomes readable only at the end: shards are renamed once all are on disk, and the index is written last.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from slime.utils.errors import ConfigError, DataError
from slime.utils.files import sync_to_disk, write_atomically
from slime.weights.file_digests import DIGEST_FILE, FolderDigests, Piece, digest_of, pieces_of
from slime.weights.named_tensors import tensor_bytes
from slime.weights.stored_tensors import INDEX_FILE, save_tensors

PARTIAL_SUFFIX = ".partial"
"""Suffix of hidden, unfinished files."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", PARTIAL_SUFFIX)
WEIGHT_INDEX_FILES = (INDEX_FILE, "pytorch_model.bin.index.json", DIGEST_FILE)
DEFAULT_SHARD_BYTES = 5 * 1024**3
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Keys of config.json, at the top level or in its text_config."""
FLAG = "--save-hf"
"""The flag that names the folder in a training run, for messages."""


def is_weight_file(name: str) -> bool:
    """Return True if a file of this name holds weights, their index or their digests."""
    return name.endswith(WEIGHT_SUFFIXES) or name in WEIGHT_INDEX_FILES


def copy_assets(source: str | Path, target: str | Path) -> None:
    """Copy every regular file that holds no weights, such as config and tokenizer."""
    for path in Path(source).iterdir():
        if path.is_file() and not is_weight_file(path.name):
            shutil.copy2(path, Path(target) / path.name)


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config without quantization."""
    plain = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    if isinstance(plain.get("text_config"), dict):
        plain["text_config"] = without_quantization(plain["text_config"])
    return plain


class HfFolderWriter:
    """Writes one model folder: call :meth:`add` for every tensor, then :meth:`close`.

    Args:
        target: the folder; it is created if missing, and weight files in it are deleted.
        assets_from: another model folder, whose config and tokenizer are copied; or None.
        shard_bytes: maximum size of a shard, unless a single tensor is larger.
        save_workers: threads that write shards while the next is filled; each holds one shard in memory.

    Raises:
        ConfigError: ``target`` is ``assets_from``, whose weights would be lost.
    """

    def __init__(
        self,
        target: str | Path,
        *,
        assets_from: str | Path | None,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        save_workers: int = 0,
    ) -> None:
        self.target = Path(target)
        if assets_from is not None and self.target.resolve() == Path(assets_from).resolve():
            raise ConfigError(f"the model cannot be written over its own source {assets_from}; choose another folder")
        self.target.mkdir(parents=True, exist_ok=True)
        for path in self.target.iterdir():
            if path.is_file() and is_weight_file(path.name):
                path.unlink()
        if assets_from is not None:
            copy_assets(assets_from, self.target)
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._weight_map: dict[str, int] = {}
        self._num_shards = 0
        self._pieces: dict[int, list[Piece]] = {}
        self._pool = ThreadPoolExecutor(save_workers) if save_workers else None
        self._max_under_way = save_workers
        self._under_way: deque[Future[None]] = deque()
        self._sync_pool = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._syncs: list[Future[None]] = []
        self.total_bytes = 0

    def __enter__(self) -> HfFolderWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Close the writer; after an error, leave the folder without an index."""
        if kind is None:
            self.close()
            return
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._sync_pool.shutdown()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor, copied to the host.

        Raises:
            DataError: the name was added before.
        """
        if name in self._weight_map or name in self._pending:
            raise DataError(f"tensor {name} was given twice while writing {self.target}")
        size = tensor_bytes(tensor)
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size

    def add_all(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Add many tensors."""
        for name, tensor in named_tensors:
            self.add(name, tensor)

    def _flush(self) -> None:
        self._num_shards += 1
        path = self._unfinished(self._num_shards)
        if self._pool is None:
            self._save(self._num_shards, self._pending, path)
        else:
            if len(self._under_way) >= self._max_under_way:
                self._under_way.popleft().result()
            self._under_way.append(self._pool.submit(self._save, self._num_shards, self._pending, path))
        for name in self._pending:
            self._weight_map[name] = self._num_shards
        self.total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _unfinished(self, shard: int) -> Path:
        return self.target / f".model-{shard:05d}{PARTIAL_SUFFIX}"

    def _save(self, shard: int, tensors: dict[str, Tensor], path: Path) -> None:
        save_tensors(path, tensors)
        self._syncs.append(self._sync_pool.submit(sync_to_disk, path))  # runs while the next shard is filled
        self._pieces[shard] = pieces_of(path, tensors)

    def close(self) -> Path:
        """Write the last shard, the digests and the index; return the folder."""
        if self._pending:
            self._flush()
        if self._pool is not None:
            while self._under_way:
                self._under_way.popleft().result()
            self._pool.shutdown()
        for sync in self._syncs:
            sync.result()
        self._sync_pool.shutdown()
        names = {
            shard: f"model-{shard:05d}-of-{self._num_shards:05d}.safetensors"
            for shard in range(1, self._num_shards + 1)
        }
        for shard, name in names.items():
            os.replace(self._unfinished(shard), self.target / name)
        index = {
            "metadata": {"total_size": self.total_bytes},
            "weight_map": {name: names[shard] for name, shard in sorted(self._weight_map.items())},
        }
        for path in self.target.iterdir():  # including config and tokenizer
            if path.is_file():
                sync_to_disk(path)
        content = (json.dumps(index, indent=2) + "\n").encode()
        pieces = {names[shard]: pieces for shard, pieces in self._pieces.items()}
        digests = FolderDigests(self.target, {**pieces, INDEX_FILE: [(0, len(content), digest_of(content))]})
        digests.write(flag=FLAG)
        write_atomically(self.target / INDEX_FILE, lambda file: file.write(content), what="The index", flag=FLAG)
        return self.target
