"""Reloads tensors that pushes do not carry once an engine has slept.

An engine that sleeps releases its weights without a copy, and the next push restores what the trainer holds.  The rest
(a vision tower that is not trained, DeepSeek-V4's tables of experts) is read from the engine's checkpoint again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from slime.ext.fast_push.manifest import TensorEntry
from slime.utils.errors import WeightSyncError
from slime.weights.stored_tensors import read_layout

_HAS_SLEPT = "_slime_has_slept"
"""Attribute of a model whose weights were released since its kept tensors were read."""


def note_sleep(result: Any, model: nn.Module, *args: Any, **options: Any) -> None:
    """Remember that the weights of ``model`` were released; called when their memory is back, undefined."""
    vars(model)[_HAS_SLEPT] = True


def restore_kept(model: nn.Module, kept: Sequence[TensorEntry]) -> None:
    """Load the tensors that pushes do not carry, if the model has slept since they were loaded.

    Raises:
        WeightSyncError: the engine's checkpoint no longer has them.
    """
    if not kept or not vars(model).get(_HAS_SLEPT):
        return
    files = _files(_checkpoint(), tuple(entry.name for entry in kept))
    model.load_weights(list(_read(files)))  # type: ignore[operator]
    vars(model)[_HAS_SLEPT] = False


def _checkpoint() -> str:
    from sglang.srt.server_args import get_global_server_args

    path: str = get_global_server_args().model_path
    return path


@functools.lru_cache(maxsize=4)
def _files(folder: str, names: tuple[str, ...]) -> dict[Path, list[str]]:
    """Return file -> names of its tensors."""
    layout = read_layout(folder)
    if missing := [name for name in names if name not in layout]:
        raise WeightSyncError(
            f"the engine lost {len(missing)} tensors that the trainer does not have, such as {missing[0]}, when it "
            f"slept, and {folder} no longer has them. Restore the folder, or start engines with "
            "--sglang-enable-weights-cpu-backup"
        )
    files: dict[Path, list[str]] = {}
    for name in names:
        files.setdefault(layout[name].file, []).append(name)
    return files


def _read(files: Mapping[Path, Sequence[str]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by name; a tensor's bytes are read from the file when a loader copies them."""
    for path, names in files.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                yield name, file.get_tensor(name)
