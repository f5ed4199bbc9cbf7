"""megatron-core's load of a sharded state, with readers that run nothing of what the files hold."""

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
"""The exceptions of loading a checkpoint that does not fit; a DataError is a ValueError."""


def load_sharded(state: dict[str, Any], reader: CheckpointReader, *, validate_access_integrity: bool = True) -> Any:
    """Return ``state`` with the values of a checkpoint, and what all ranks share beside it.  Collective.

    Args:
        state: sharded tensors and objects that are asked for; tensors are read in place.
        validate_access_integrity: check that the ranks ask for each tensor exactly once.

    Raises:
        CheckpointException: on every rank, with the errors of all (torch's).
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
    """Give megatron-core this reader; its strategy makes its own, which runs pickles, and has no parameter for it."""
    original = torch_strategy._get_filesystem_reader
    torch_strategy._get_filesystem_reader = lambda *args, **kwargs: reader
    try:
        yield
    finally:
        torch_strategy._get_filesystem_reader = original


class _Common(TorchCommonLoadStrategy):
    """Reads ``common.pt`` without running what is in it."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
        """Return what all ranks share."""
        return self._reader.read_common()


def first_cause(error: BaseException) -> BaseException:
    """Return the first rank's exception, out of the one that torch wraps around those of all ranks."""
    if isinstance(error, CheckpointException):
        for cause, _ in error.failures.values():
            return cause
    return error
