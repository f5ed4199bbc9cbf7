"""What the engines hold, as the trainer remembers it: the bytes that the next changes are told against.

The base moves in two steps, as a push does: :meth:`DeltaBase.encode` compares new weights with it, and only
:meth:`DeltaBase.commit`, when the engines serve them, makes them the base.  In between the compressed changes are
kept, not a second copy of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from slime.utils.errors import WeightSyncError
from slime.weights.delta import Bytes, EncodedDelta, apply_delta, encode_delta


class DeltaBase:
    """The base of the tensors of one process.

    Args:
        encoding: of the changes, see ``slime.weights.delta``.
        checksum: of the new bytes.
    """

    def __init__(self, *, encoding: str, checksum: str) -> None:
        self._tensors: dict[str, Bytes] = {}
        self._encoding, self._checksum = encoding, checksum
        self._pending: dict[str, EncodedDelta | Bytes] = {}

    def seed(self, name: str, data: Bytes) -> None:
        """What engines hold of a tensor before the first push; the array is the base's from now on."""
        self._tensors[name] = data

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def replace(self, name: str, new: Bytes) -> None:
        """The tensor travels whole: with the commit ``new`` is its base."""
        self._pending[name] = new

    def encode(self, name: str, new: Bytes) -> EncodedDelta | None:
        """The change of one tensor from the base to ``new``; None when there is none.

        Raises:
            WeightSyncError: the base has no such tensor, or one of another size.
        """
        if name not in self._tensors:
            raise WeightSyncError(f"{name} is new since the first push; the model's parameters must not change")
        encoded = encode_delta(self._tensors[name], new, encoding=self._encoding, checksum=self._checksum)
        if encoded is None:
            self._pending.pop(name, None)
        else:
            self._pending[name] = encoded
        return encoded

    def commit(self, workers: int = 1) -> None:
        """The engines serve what was encoded last: make it the base.

        Args:
            workers: threads, each for one tensor at a time.

        Raises:
            WeightSyncError: a tensor did not become what it should; the base is of no use any more.
        """
        pending, self._pending = self._pending, {}
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(self._advance, pending, pending.values()):
                pass

    def _advance(self, name: str, change: EncodedDelta | Bytes) -> None:
        if not isinstance(change, EncodedDelta):
            self._tensors[name] = change
            return
        found = apply_delta(self._tensors[name], change.blob, encoding=self._encoding, checksum=self._checksum)
        if found != change.checksum:
            raise WeightSyncError(
                f"the trainer's own base of {name} has the checksum {found} after a commit instead of "
                f"{change.checksum}: host memory was damaged"
            )

    def discard(self) -> None:
        """The engines did not take what was encoded last: the base stays."""
        self._pending = {}

    def items(self) -> Iterator[tuple[str, Bytes]]:
        """All tensors of the base."""
        yield from self._tensors.items()
