"""Reads a ``torch_dist`` folder from an untrusted source.

Nothing in it is executed: ``slime.utils.safe_pickle`` reads the pickles.  If the folder has digests, everything read
is verified against them.  Missing or truncated data and data of another checkpoint raise errors that name the file and
the tensor.
"""

from __future__ import annotations

import concurrent.futures
import io
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from slime.utils.errors import DataError
from slime.utils.files import opened, parse_object, read_outside_file
from slime.utils.safe_pickle import load_pickle, load_torch
from slime.weights.file_digests import OVERLAP_BYTES, FolderDigests

COMMON_FILE = "common.pt"
TENSOR_FILE = ".metadata"
FORMAT_FILE = "metadata.json"
FORMAT = "torch_dist"
FORMAT_KEYS = {"sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version"}
MAX_BYTES = 4 << 30
"""Size limit of the small files of a checkpoint, which are read whole."""
OTHER_CHECKPOINT = "Copy the checkpoint again, or use another one."


class CheckpointReader(dcp.FileSystemReader):
    """Reads one checkpoint folder, ``iter_0000012`` or ``release``, for torch and Megatron.  Thread-safe.

    Args:
        verify: verify digests if the folder has them (off with ``--no-verify-checkpoint``).
    """

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        """Read the folder's metadata and digests.

        Raises:
            DataError: the checkpoint is incomplete or damaged.
        """
        super().__init__(folder)
        self.folder = Path(folder)
        for name in (COMMON_FILE, TENSOR_FILE):
            if not (self.folder / name).exists():
                raise DataError(
                    f"{folder}: no {name} in it; name an iter_... or release folder of a checkpoint whose save was "
                    "completed"
                )
        self.digests = FolderDigests.read(self.folder) if verify else None
        self.expected_shapes: Mapping[str, tuple[int, ...]] = {}
        """Tensors that the next load requests, with their whole shapes."""
        self.metadata = self._read_metadata()
        self.storage_data = self.metadata.storage_data

    def read_file(self, name: str) -> bytes:
        """Return the content of a small file.

        Raises:
            DataError: it is missing, damaged or larger than ``MAX_BYTES``.
        """
        if self.digests is not None:
            self.digests.check_size(name)
        try:
            data = read_outside_file(self.folder / name, max_bytes=MAX_BYTES)
        except DataError as error:
            raise DataError(f"{error} {OTHER_CHECKPOINT}") from error
        if self.digests is not None:
            self.digests.check(name, 0, data)
        return data

    def read_common(self) -> dict[str, Any]:
        """Return the arguments, the schedule and the counters of the run that saved the checkpoint.

        Objects of unknown classes are replaced by placeholders.

        Raises:
            DataError: the file is damaged, or is not the common file of a checkpoint.
        """
        common = load_torch(self.read_file(COMMON_FILE), where=self.folder / COMMON_FILE, tolerant=True)
        if not isinstance(common, dict):
            raise DataError(
                f"{self.folder / COMMON_FILE} holds a {type(common).__name__}, not the dict of a checkpoint. "
                f"{OTHER_CHECKPOINT}"
            )
        if not isinstance(args := common.get("args"), Namespace | None):
            raise DataError(
                f"{self.folder / COMMON_FILE} has {str(args)[:80]!r} ({type(args).__name__}) in place of the "
                f"arguments. {OTHER_CHECKPOINT}"
            )
        return common

    def check_files(self) -> None:
        """Read the small files, and check the other files' sizes against them.

        Raises:
            DataError: a file is missing, truncated, or has another format.
        """
        self.check_format()
        self.read_common()
        ends: dict[str, int] = {}
        for place in self.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in sorted(ends.items()):
            if self.digests is not None:
                self.digests.check_size(name)
            path = self.folder / name
            size = path.stat().st_size if path.is_file() else None
            if size is None or size < end:
                has = "is missing" if size is None else f"has {size} bytes"
                raise DataError(f"{path} {has}; {TENSOR_FILE} puts tensors into its first {end}. {OTHER_CHECKPOINT}")

    def check_format(self) -> None:
        """Check that ``metadata.json`` names the format ``torch_dist``.

        Raises:
            DataError: it is damaged or names another format.
        """
        path = self.folder / FORMAT_FILE
        try:
            content = parse_object(self.read_file(FORMAT_FILE))
            found, unknown = content["sharded_backend"], content.keys() - FORMAT_KEYS
            if unknown:
                raise ValueError(f"unknown keys {sorted(unknown)}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f'{path} does not name the format of a checkpoint, as in {{"sharded_backend": "{FORMAT}"}} '
                f"({type(error).__name__}: {error}). {OTHER_CHECKPOINT}"
            ) from error
        if found != FORMAT:
            raise DataError(f"{path}: the format is {found!r}; only {FORMAT} is read. Save it in that format.")

    def _read_metadata(self) -> Metadata:
        path = self.folder / TENSOR_FILE
        metadata = load_pickle(self.read_file(TENSOR_FILE), where=path, tolerant=True)
        entries, places = (getattr(metadata, name, None) for name in ("state_dict_metadata", "storage_data"))
        if (
            not isinstance(metadata, Metadata)
            or not isinstance(entries, dict)
            or not entries
            or not isinstance(places, dict)
        ):
            raise DataError(f"{path} does not list the tensors' files. {OTHER_CHECKPOINT}")
        for index, place in places.items():
            if not isinstance(index, MetadataIndex) or not isinstance(getattr(index, "fqn", None), str):
                raise DataError(f"{path} has {str(index)[:80]!r} in place of a tensor's name. {OTHER_CHECKPOINT}")
            name = getattr(place, "relative_path", None)
            if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
                raise DataError(f"{path} puts {index.fqn} into {name!r}, which is not a file of {self.folder}.")
            begin, length = getattr(place, "offset", None), getattr(place, "length", None)
            if type(begin) is not int or type(length) is not int:
                raise DataError(f"{path} puts {index.fqn} at {begin!r}, {length!r} bytes. {OTHER_CHECKPOINT}")
        for key, entry in entries.items():
            if problem := _problem_with_entry(key, entry, places):
                raise DataError(f"{path}: {key} {problem}. {OTHER_CHECKPOINT}")
        return metadata

    # The interface that torch calls

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the file and offset of each tensor."""
        if getattr(self.metadata, "storage_meta", None) is None:
            self.metadata.storage_meta = StorageMeta()
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that the requested tensors exist; torch reports an error raised here to all ranks."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        for key, shape in sorted(self.expected_shapes.items()):
            entry = metadata.state_dict_metadata.get(key)
            if not isinstance(entry, TensorStorageMetadata):
                raise DataError(f"{self.folder}: there is no tensor {key}, {list(shape)} by the flags")
            if tuple(entry.size) != shape:
                raise DataError(f"{self.folder}: {key} is {list(entry.size)} there and {list(shape)} by the flags")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan, file by file, in the order of their offsets."""
        places = [(self.storage_data[item.storage_index], item) for item in plan.items]
        files: dict[str, list[tuple[Any, ReadItem]]] = {}
        for place, item in sorted(places, key=lambda pair: (pair[0].relative_path, pair[0].offset)):
            files.setdefault(place.relative_path, []).append((place, item))
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="digest") as pool:
            for name, items in files.items():
                if self.digests is not None:
                    self.digests.check_size(name)
                with self._opened(name, items[0][1]) as file:
                    self._read_items(file, name, items, planner, pool)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_items(
        self,
        file: Any,
        name: str,
        items: list[tuple[Any, ReadItem]],
        planner: LoadPlanner,
        pool: concurrent.futures.Executor,
    ) -> None:
        """Read items of one file.  A thread of ``pool`` verifies the digest of a large piece while this one decodes it
        and reads the next.

        Raises:
            DataError: the file is damaged.
        """
        verdict: concurrent.futures.Future[None] | None = None
        last: tuple[int, Any] | None = None
        for place, item in items:
            # Items that are parts of the same piece are adjacent in this order.
            if last is None or last[0] != place.offset:
                data = self._read_piece(file, name, place, item)
                if verdict is not None:
                    verdict.result()
                verdict = None
                if self.digests is not None:
                    check = partial(self.digests.check, name, place.offset, data, what=item.storage_index.fqn)
                    verdict = pool.submit(check) if len(data) >= OVERLAP_BYTES else check()
                try:
                    last = place.offset, self._decode(data, name, place, item)
                except DataError:
                    if verdict is not None:
                        verdict.result()  # a digest error is more specific than the decoding error
                    raise
            self._deliver(last[1], name, item, planner)
        if verdict is not None:
            verdict.result()

    @contextmanager
    def _opened(self, name: str, item: ReadItem) -> Iterator[Any]:
        path = self.folder / name
        try:
            with opened(path) as file:
                yield file
        except OSError as error:
            raise DataError(
                f"{path} cannot be read ({error.strerror}); it holds {item.storage_index.fqn}. {OTHER_CHECKPOINT}"
            ) from error

    def _read_piece(self, file: Any, name: str, place: Any, item: ReadItem) -> bytes:
        key = item.storage_index.fqn
        size = os.fstat(file.fileno()).st_size
        if not 0 <= place.offset <= place.offset + place.length <= size:
            raise DataError(
                f"{self.folder / name} has {size} bytes, and {key} would be the {place.length} at {place.offset}; the "
                f"file is truncated, or of another checkpoint. {OTHER_CHECKPOINT}"
            )
        return _read_at(file.fileno(), place.offset, place.length)

    def _decode(self, data: bytes, name: str, place: Any, item: ReadItem) -> Any:
        """Return a piece's tensor; for an object, its bytes, saved again from the safely loaded object."""
        key = item.storage_index.fqn
        if item.type is LoadItemType.BYTE_IO:
            again = io.BytesIO()  # torch's planner unpickles these bytes, so it must not get the file's own
            torch.save(load_torch(data, where=f"{self.folder / name}: {key}"), again)
            return again.getvalue()
        try:
            tensor = load_torch(data, where=f"{self.folder / name}: {key}")
        except DataError as error:
            raise DataError(
                f"{self.folder / name}: the {place.length} bytes at {place.offset} are not the tensor {key}; the file "
                f"is damaged, or of another checkpoint. {OTHER_CHECKPOINT}"
            ) from error
        self._check_chunk(tensor, name, item)
        return tensor

    def _check_chunk(self, tensor: Any, name: str, item: ReadItem) -> None:
        key, offset = item.storage_index.fqn, item.storage_index.offset
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        chunks = [chunk for chunk in entry.chunks if offset is None or chunk.offsets == offset]
        shape = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        allowed = [list(chunk.sizes) for chunk in chunks]
        if shape not in allowed or tensor.dtype != entry.properties.dtype:
            expected = f"{allowed[0]} {entry.properties.dtype}" if allowed else "absent"
            raise DataError(
                f"{self.folder / name}: {key} is {shape} {getattr(tensor, 'dtype', '')} there, and {expected} by "
                f"{TENSOR_FILE}; the file is of another checkpoint. {OTHER_CHECKPOINT}"
            )

    def _deliver(self, value: Any, name: str, item: ReadItem, planner: LoadPlanner) -> None:
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(value))
            return
        part = value[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))]
        target = planner.resolve_tensor(item).detach()
        if target.shape != part.shape:
            raise DataError(
                f"{self.folder / name}: {item.storage_index.fqn} gives {list(part.shape)} where {list(target.shape)} "
                "are wanted; compare the model flags"
            )
        target.copy_(part)
        planner.commit_tensor(item, target)


def _problem_with_entry(key: Any, entry: Any, places: Mapping[Any, Any]) -> str | None:
    """Return the problem with a tensor's or object's metadata entry, as the end of a sentence; None if valid."""
    if isinstance(key, str) and isinstance(entry, BytesStorageMetadata):
        return None if MetadataIndex(key) in places else "is in no file"
    if not isinstance(key, str) or not isinstance(entry, TensorStorageMetadata):
        return f"is a {type(entry).__name__}, neither a tensor nor an object"
    size: Any
    size, properties, chunks = (getattr(entry, name, None) for name in ("size", "properties", "chunks"))
    dtype = getattr(properties, "dtype", None)
    if not _is_shape(size) or not isinstance(dtype, torch.dtype) or not isinstance(chunks, list):
        return f"has the shape {str(size)[:80]}, the dtype {str(dtype)[:80]}, and the chunks {str(chunks)[:80]}"
    num_elements = 0
    for chunk in chunks:
        offsets: Any = getattr(chunk, "offsets", None)
        sizes: Any = getattr(chunk, "sizes", None)
        is_part = _is_shape(offsets) and _is_shape(sizes) and len(offsets) == len(sizes) == len(size)
        if not is_part or any(begin + count > end for begin, count, end in zip(offsets, sizes, size, strict=True)):
            return f"has a part of {str(sizes)[:80]} at {str(offsets)[:80]}, and {list(size)} in all"
        if MetadataIndex(key, offsets) not in places:
            return f"has a part at {list(offsets)} that is in no file"
        if sizes.numel() * dtype.itemsize > (length := places[MetadataIndex(key, offsets)].length):
            return f"has a part of {list(sizes)} {dtype} in {length} bytes"
        num_elements += sizes.numel()
    return f"has {num_elements} elements in its parts, and is {list(size)}" if num_elements < size.numel() else None


def _is_shape(value: Any) -> bool:
    return isinstance(value, torch.Size) and all(count >= 0 for count in value)


def _read_at(descriptor: int, offset: int, length: int) -> bytes:
    """Return bytes of a file; a system call reads at most 2 GiB."""
    parts = []
    while length > 0 and (part := os.pread(descriptor, length, offset)):
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
