"""Loads a sharded state through megatron-core, with readers that never execute what the files contain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from torch.distributed.checkpoint.api import CheckpointException

from slime.backends.megatron_utils.checkpoints.checkpoint_reader import CheckpointReader

LOAD_ERRORS = (CheckpointException, CheckpointingException, KeyError, RuntimeError, ValueError)
"""Exceptions raised by loading a checkpoint that does not fit; DataError is a ValueError."""


def load_sharded(state: dict[str, Any], reader: CheckpointReader, *, validate_access_integrity: bool = True) -> Any:
    """Return ``state`` with the values of a checkpoint, merged with its common (unsharded) state.  Collective.

    Args:
        state: the sharded tensors and objects to load; tensors are read in place.
        validate_access_integrity: check that the ranks together request each tensor exactly once.

    Raises:
        CheckpointException: torch's; raised on every rank, with the errors of all ranks.
    """
    reader.check_format()
    sharded, _, _ = load_preprocess(dict(state))
    entries = [entry for entry in nested_values(sharded) if isinstance(entry, ShardedTensor)]
    reader.expected_shapes = {
        entry.key: tuple(entry.global_shape) for entry in entries if not entry.allow_shape_mismatch
    }
    with _readers_of_megatron(reader):
        return dist_checkpointing.load(
            state,
            str(reader.folder),
            sharded_strategy=torch_strategy.TorchDistLoadShardedStrategy(),
            common_strategy=_Common(reader),
            validate_access_integrity=validate_access_integrity,
        )


@contextmanager
def _readers_of_megatron(reader: CheckpointReader) -> Iterator[None]:
    """Make megatron-core use this reader: its strategy has no parameter for one and would unpickle unsafely."""
    original = torch_strategy._get_filesystem_reader
    torch_strategy._get_filesystem_reader = lambda *args, **kwargs: reader
    try:
        yield
    finally:
        torch_strategy._get_filesystem_reader = original


class _Common(TorchCommonLoadStrategy):
    """Reads ``common.pt`` without executing its pickles."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
        """Return the common (unsharded) state."""
        return self._reader.read_common()


def first_cause(error: BaseException) -> BaseException:
    """Return the exception of the first failed rank from torch's CheckpointException; return others unchanged."""
    if isinstance(error, CheckpointException):
        for cause, _ in error.failures.values():
            return cause
    return error
