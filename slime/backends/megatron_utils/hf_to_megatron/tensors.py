"""Reads the tensors of a Hugging Face checkpoint by name, one at a time."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slime.utils.errors import DataError
from slime.utils.files import read_model_config
from slime.weights.file_digests import OVERLAP_BYTES, FolderDigests, check_header, check_tensor
from slime.weights.quantize import read_format
from slime.weights.quantize.formats import WeightFormat, logical_names, read_weight
from slime.weights.quantize.mxfp4 import METHOD as MXFP4
from slime.weights.stacked_experts import ExpertStacker, Stack, find_stacks, is_stack, place_of, row_of, tensors_in
from slime.weights.stored_tensors import TORCH_DTYPES, read_layout

INDEX_FILE = "model.safetensors.index.json"
MAX_OPEN_FILES = 2
DIGEST_THREADS = 4
"""One thread verifies digests as fast as another copies; with a few, reading never waits."""


@functools.lru_cache(maxsize=4)
def stored_names(folder: str) -> frozenset[str]:
    """Return all tensor names in a checkpoint's files, with parts of quantized ones; empty without safetensors."""
    if not any(Path(folder).glob("*.safetensors")):
        return frozenset()
    with HfTensors(folder, verify=False) as tensors:
        return tensors.stored_names()


@functools.lru_cache(maxsize=4)
def tensor_names(folder: str) -> frozenset[str]:
    """Return all tensor names of a checkpoint, as if none were quantized or stacked; empty without safetensors."""
    if not stored_names(folder):
        return frozenset()
    with HfTensors(folder, verify=False) as tensors:
        return frozenset(tensors.names())


@functools.lru_cache(maxsize=4)
def stored_dtypes(folder: str) -> Mapping[str, torch.dtype]:
    """Return the dtype of each unquantized floating-point tensor of a checkpoint, with stacked experts listed
    individually; empty without safetensors.
    """
    if not stored_names(folder):
        return {}
    plain = ("F64", "F32", "F16", "BF16")
    with HfTensors(folder, verify=False) as tensors:
        stored = {
            name: TORCH_DTYPES[entry.dtype] for name, entry in read_layout(folder).items() if entry.dtype in plain
        }
        return {part: dtype for name, dtype in stored.items() for part in tensors_in(name, tensors.stacks)}


def in_stored_dtype(
    name: str, tensor: Tensor, dtypes: Mapping[str, torch.dtype], default: torch.dtype | None
) -> Tensor:
    """Cast a HF tensor to its dtype in a folder (:func:`stored_dtypes`), or else to ``default``.

    A router's bias is never cast to ``default``; None does not cast.
    """
    name = row[0] if (row := row_of(name)) else name
    dtype = dtypes.get(name, tensor.dtype if "correction_bias" in name else default)
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


class MissingTensorError(DataError, KeyError):
    """The checkpoint does not have a tensor that the model needs."""

    __str__ = Exception.__str__


class HfTensors:
    """A folder of safetensors as a mapping that reads on demand and records which tensors were read.

    Experts that are stacked in one tensor appear individually (``slime.weights.stacked_experts``).

    Invariant: at most the tensor being returned is in memory; files are mapped, not loaded.  Other threads verify the
    digests of large tensors, so damage raises an error a few tensors later, at the latest when the folder is closed.
    """

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        """Read the headers.

        Args:
            verify: verify what is read against the folder's digests, if it has any.

        Raises:
            DataError: there are no safetensors; a file is damaged or outside of the folder; or the files do not hold
                exactly the tensors of the index, each once.
        """
        self.folder = Path(folder)
        self.read: set[str] = set()
        """Names requested so far."""
        self.rows: dict[str, int] = {}
        """Number of rows of the stored tensors from which single rows were requested."""
        self._pool = ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="digest")
        self._verdicts: deque[Future[None]] = deque()
        self._open: dict[str, tuple[Any, ExitStack]] = {}
        if not (self.folder / INDEX_FILE).is_file() and not any(self.folder.glob("*.safetensors")):
            raise DataError(f"{folder} has no *.safetensors; convert the checkpoint to safetensors.")
        self._digests = FolderDigests.read(self.folder) if verify else None
        self._layout = read_layout(self.folder)
        self._file_of = {name: stored.file.name for name, stored in self._layout.items()}
        if self._digests is not None:
            for name in sorted(set(self._file_of.values())):
                check_header(self._digests, self.folder / name)

    def __enter__(self) -> HfTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._await_verdicts(0)  # a digest error is more specific than the errors it causes
        finally:
            self._pool.shutdown()
            for _, stack in self._open.values():
                stack.close()
            self._open.clear()

    def stored_names(self) -> frozenset[str]:
        """Return the names in the files."""
        return frozenset(self._file_of)

    def names(self) -> list[str]:
        """Return all names, as if no tensor were quantized or stacked."""
        return list(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def get(self, name: str) -> Tensor:
        """Return a tensor on the CPU, or by a name like ``X[3]`` a row of one; quantized ones are dequantized to bf16.

        Raises:
            MissingTensorError: there is no such tensor.
            DataError: it is quantized and its scales are missing or do not fit.
            ConfigError: it is quantized in an unsupported way.
        """
        row = row_of(name)
        if row is not None:
            name = row[0]
        if name not in self._names:
            raise MissingTensorError(
                f"{self.folder} has no tensor {name}; the checkpoint does not fit the model flags."
            )
        self.read.add(name)
        if row is not None:
            return read_weight(name, lambda part: self._row_of_stored(part, row[1]), self._file_of, None)
        if name not in self._file_of and (place := place_of(name)) and place.stack in self.stacks:
            part = self._handle(self._file_of[place.stack]).get_slice(place.stack)[place.expert]
            self._check(place.stack, part, row=place.expert)
            return place.cut(self.stacks[place.stack].matrices(part))
        return read_weight(name, self.get_stored, self._file_of, self._format)

    def _row_of_stored(self, name: str, row: int) -> Tensor:
        stored = self._handle(self._file_of[name]).get_slice(name)
        self.rows[name] = stored.get_shape()[0]
        part = stored[row]
        self._check(name, part, row=row)
        return part

    def get_stored(self, name: str) -> Tensor:
        """Return a tensor of :meth:`stored_names` as it is in the files."""
        tensor = self._handle(self._file_of[name]).get_tensor(name)
        self._check(name, tensor)
        return tensor

    def where(self, name: str) -> str:
        """Return the file that holds a tensor, for messages."""
        return str(self.folder / self._file_of[name]) if name in self._file_of else str(self.folder)

    def _check(self, name: str, tensor: Tensor, *, row: int | None = None) -> None:
        if self._digests is None:
            return
        if row is not None and len(self._layout[name].shape) < 3:  # a stack of biases has one digest
            self.get_stored(name)
        elif tensor.nbytes < OVERLAP_BYTES:
            check_tensor(self._digests, self._layout[name], tensor, row=row)
        else:
            self._await_verdicts(DIGEST_THREADS)
            verdict = self._pool.submit(check_tensor, self._digests, self._layout[name], tensor, row=row)
            self._verdicts.append(verdict)

    def _await_verdicts(self, left: int) -> None:
        while len(self._verdicts) > left:
            self._verdicts.popleft().result()

    @functools.cached_property
    def stacks(self) -> dict[str, Stack]:
        """The tensors that stack experts, by name."""
        names = [name for name in self._file_of if is_stack(name.removesuffix("_bias"))]
        return find_stacks({name: self._handle(self._file_of[name]).get_slice(name).get_shape() for name in names})

    @functools.cached_property
    def _names(self) -> dict[str, None]:
        names: dict[str, None] = {}
        for name in logical_names({name: stored.dtype for name, stored in self._layout.items()}):
            names.update(dict.fromkeys(tensors_in(name, self.stacks)))
        return names

    @functools.cached_property
    def _format(self) -> WeightFormat | None:
        has_config = (self.folder / "config.json").is_file()
        settings = read_model_config(self.folder).get("quantization_config") if has_config else None
        # MXFP4 tensors are recognized by their names.
        return None if settings and settings.get("quant_method") == MXFP4 else read_format(settings)

    def _handle(self, file: str) -> Any:
        """Return the open file.  Pages read from it count as this process's memory until the file is closed."""
        if file not in self._open:
            while len(self._open) >= MAX_OPEN_FILES:
                self._open.pop(next(iter(self._open)))[1].close()
            stack = ExitStack()
            try:
                self._open[file] = stack.enter_context(safe_open(self.folder / file, framework="pt")), stack
            except (SafetensorError, OSError) as error:
                raise DataError(
                    f"{self.folder / file} cannot be read ({error}); copy the checkpoint again."
                ) from error
        self._open[file] = self._open.pop(file)  # keeps the least recently used file first
        return self._open[file][0]


def in_layout_of(
    source: Path | None,
    is_left_out: Callable[[str], bool],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    verify: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the layout of ``source``, followed by copies of those that only ``source`` has.

    Args:
        source: the folder whose config describes the result; None or a folder without safetensors changes nothing.
        is_left_out: returns True for names that are copied from ``source`` if ``tensors`` does not have them.
        verify: verify what is read from ``source`` against its digests.

    Raises:
        DataError: ``source`` stacks experts, and ``tensors`` has only some of them.
    """
    if source is None or not stored_names(str(source)):
        yield from tensors
        return
    with HfTensors(source, verify=verify) as stored:
        stacker = ExpertStacker(stored.stacks)
        missing = {name for name in stored.stored_names() if is_left_out(name)}
        for name, tensor in stacker.stack(tensors):
            missing.discard(name)
            yield name, tensor
        stacker.finish()
        for name in sorted(missing):
            yield name, stored.get_stored(name)
