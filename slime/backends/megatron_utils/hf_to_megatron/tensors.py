"""The tensors of a Hugging Face checkpoint, by name, one at a time."""

from __future__ import annotations

import functools
import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slime.utils.errors import DataError

INDEX_FILE = "model.safetensors.index.json"
FP8_BLOCK = 128
MAX_OPEN_FILES = 2


@functools.lru_cache(maxsize=4)
def tensor_names(folder: str) -> frozenset[str]:
    """Names of all tensors of a checkpoint; none for a folder without safetensors."""
    if not (Path(folder) / INDEX_FILE).is_file() and not any(Path(folder).glob("*.safetensors")):
        return frozenset()
    with HfTensors(folder) as tensors:
        return frozenset(tensors.names())


class MissingTensorError(DataError, KeyError):
    """The checkpoint has no tensor of a name that the model needs."""

    __str__ = Exception.__str__


class HfTensors:
    """A folder of safetensors as a mapping that reads on demand and remembers what was read.

    Invariant: at most the tensor being returned is in memory; files are mapped, not loaded.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read the index, or the headers where there is none.

        Raises:
            DataError: there are no safetensors, or a file is damaged.
        """
        self.folder = Path(folder)
        self.read: set[str] = set()
        """Names asked for so far."""
        self._open: dict[str, tuple[Any, ExitStack]] = {}
        index = self.folder / INDEX_FILE
        if index.is_file():
            try:
                self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError) as error:
                raise DataError(f"{index} is damaged ({error!r}); copy the checkpoint again.") from error
            return
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise DataError(f"{folder} has no *.safetensors; convert the checkpoint to safetensors.")
        self._file_of = {name: path.name for path in files for name in self._handle(path.name).keys()}

    def __enter__(self) -> HfTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, stack in self._open.values():
            stack.close()
        self._open.clear()

    def names(self) -> list[str]:
        """All names, but for the scales of quantized tensors, which belong to these."""
        return [name for name in self._file_of if not name.endswith("_scale_inv")]

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str) -> Tensor:
        """The tensor on the CPU; one-byte tensors with ``{name}_scale_inv`` are dequantized to bf16.

        Raises:
            MissingTensorError: there is no such tensor.
        """
        if name not in self._file_of:
            raise MissingTensorError(
                f"{self.folder} has no tensor {name}; the checkpoint does not fit the model flags."
            )
        self.read.add(name)
        tensor = self._handle(self._file_of[name]).get_tensor(name)
        scale_name = f"{name}_scale_inv"
        if tensor.element_size() == 1 and scale_name in self._file_of:
            tensor = dequantize_blocks(tensor, self._handle(self._file_of[scale_name]).get_tensor(scale_name))
        return tensor

    def _handle(self, file: str) -> Any:
        """The open file.  What was read of a file counts as this process's memory until the file is closed."""
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
        self._open[file] = self._open.pop(file)  # the one used longest ago is the first
        return self._open[file][0]


def dequantize_blocks(quantized: Tensor, scale: Tensor, block: int = FP8_BLOCK) -> Tensor:
    """[m, n] one-byte floats times [ceil(m / block), ceil(n / block)] scales, in bf16."""
    rows, columns = quantized.shape
    expanded = scale.float().repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    return (quantized.float() * expanded).to(torch.bfloat16)
