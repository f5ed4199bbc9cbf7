"""Copies of the trainer's state in host memory that survive its ranks (``--trainer-recovery memory``).

    a step ends -> each rank copies its state to its host -> the next step begins
             in the background: -> a keeper on the rank's node and one on the next node -> every rank's copy arrived
                                -> this copy becomes the current one, and the previous one's memory is reused

A keeper is an actor that only holds copies.  For each rank it holds two: the current one and the incoming one.  So a
death in the middle of a copy leaves all ranks with the same earlier copy.  If a node dies, the copies of its ranks are
on the next node, and those of other ranks on their own nodes.

Actor and critic are copied together, after both have trained on a rollout, so that they return to the same rollout.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.ext.recovery.state_copy import CopyFlags, StateCopy
from slime.ray.waiting import wait_for
from slime.utils.errors import DataError, DeadlineError, EngineDiedError
from slime.weights.file_digests import digest_of

logger = logging.getLogger(__name__)

COPY_GROUP = "copy"
"""Concurrency group in which a rank sends its copy while it works."""
CHUNK_BYTES = 64 << 20
"""Size of the chunks in which copies are sent and digested."""
CHUNKS_UNDER_WAY = 2
"""Maximum chunks per rank in Ray's object store at a time."""
KEEPER_CALLS = 8
"""Number of calls that a keeper serves concurrently."""
KEEPER_ERRORS = (EngineDiedError, DeadlineError, RayError)
"""Errors of calls to a keeper that died or cannot start."""


@dataclass(eq=False, slots=True)
class KeptCopy:
    """A rank's state in a keeper."""

    rollout_id: int
    header: bytes
    data: np.ndarray
    """uint8 array ``[num_bytes]``."""
    digests: list[str] = field(default_factory=list)
    """Digests of the header and of every chunk; set last, once the copy is complete."""


class _Keeper:
    """Holds copies of the ranks of one or two nodes; calls of different ranks run concurrently."""

    def __init__(self) -> None:
        self._copies: dict[int, list[KeptCopy]] = {}

    def begin(self, rank: int, rollout_id: int, header: bytes, num_bytes: int, counting: int | None) -> None:
        """Allocate an incoming copy; of the rank's earlier copies, only the one after rollout ``counting`` is kept."""
        others = self._copies.get(rank, [])
        kept = [copy for copy in others if copy.rollout_id == counting and copy.digests]
        free = [copy.data for copy in others if copy not in kept and copy.data.size == num_bytes]
        data = free[0] if free else np.zeros(num_bytes, dtype=np.uint8)
        self._copies[rank] = [*kept, KeptCopy(rollout_id, header, data)]

    def write(self, rank: int, begin: int, chunk: np.ndarray) -> None:
        """Store a chunk of the incoming copy."""
        self._copies[rank][-1].data[begin : begin + chunk.size] = chunk

    def finish(self, rank: int, digests: list[str]) -> None:
        """Store the digests of the incoming copy, which marks it complete."""
        self._copies[rank][-1].digests = digests

    def describe(self, rank: int, rollout_id: int) -> tuple[bytes, int, list[str]] | None:
        """Return header, size in bytes and digests of a complete copy, or None."""
        copy = self._find(rank, rollout_id)
        return (copy.header, copy.data.size, copy.digests) if copy is not None else None

    def read(self, rank: int, rollout_id: int, begin: int) -> np.ndarray:
        """Return the chunk of a complete copy at byte ``begin``."""
        copy = self._find(rank, rollout_id)
        assert copy is not None, (rank, rollout_id)
        return copy.data[begin : begin + CHUNK_BYTES]

    def _find(self, rank: int, rollout_id: int) -> KeptCopy | None:
        copies = self._copies.get(rank, [])
        return next((copy for copy in copies if copy.rollout_id == rollout_id and copy.digests), None)


Keeper: Any = ray.remote(num_cpus=0, num_gpus=0, max_concurrency=KEEPER_CALLS)(_Keeper)
"""Actor class of a keeper, started with ``Keeper.remote()``."""


class CopyingRank:
    """Mixin for trainer ranks that send copies to keepers and fetch them."""

    worker: Any
    """A ``CopyingTrainRayActor``."""

    def node_id(self) -> str:
        """Return Ray's id of this node."""
        return ray.get_runtime_context().get_node_id()

    @ray.method(concurrency_group=COPY_GROUP)
    def send_copy(self, number: int, keepers: Sequence[Any], counting: int | None, timeout_s: float) -> list[bool]:
        """Send the rank's copy to every keeper; the copy's memory must not change meanwhile.

        Args:
            number: the rank's index over all ranks of actor and critic; identifies its copies.
            keepers: actor handles of the keepers.
            counting: rollout of the current copy, which must be kept.
            timeout_s: deadline of each call.

        Returns:
            for each keeper, whether it has the copy.
        """
        copy = self.worker.state_copy
        assert copy is not None, "the last step made no copy"
        return [_send(copy, number, keeper, counting, timeout_s) for keeper in keepers]

    def fetch_copy(self, number: int, rollout_id: int, keepers: Sequence[Any], timeout_s: float) -> None:
        """Fetch the rank's copy, for ``init``, from the first keeper that has it complete and undamaged.

        Raises:
            DataError: no keeper has it.
        """
        problems = []
        for keeper in keepers:
            try:
                self.worker.state_copy = _fetch(number, rollout_id, keeper, timeout_s)
                return
            except (DataError, *KEEPER_ERRORS) as error:
                problems.append(str(error).splitlines()[0])
        raise DataError(f"rank {self.worker.rank} has no complete copy of its state left: {'; '.join(problems)}")

    def drop_copy(self) -> None:
        """Drop the copy, so that ``init`` resumes from a checkpoint."""
        self.worker.state_copy = None


def _send(copy: StateCopy, rank: int, keeper: Any, counting: int | None, timeout_s: float) -> bool:
    try:
        begun = keeper.begin.remote(rank, copy.rollout_id, copy.header, copy.data.numel(), counting)
        wait_for(begun, what="room in a keeper", timeout_s=timeout_s)
        digests = [digest_of(copy.header)]
        under_way: deque[ray.ObjectRef] = deque()
        whole = copy.data.numpy()
        for begin in range(0, whole.size, CHUNK_BYTES):
            chunk = whole[begin : begin + CHUNK_BYTES]
            under_way.append(keeper.write.remote(rank, begin, chunk))
            digests.append(digest_of(chunk))
            if len(under_way) == CHUNKS_UNDER_WAY:
                wait_for(under_way.popleft(), what="a chunk to reach its keeper", timeout_s=timeout_s)
        wait_for(list(under_way), what="the last chunks to reach their keeper", timeout_s=timeout_s)
        wait_for(keeper.finish.remote(rank, digests), what="the end of a copy in a keeper", timeout_s=timeout_s)
    except KEEPER_ERRORS as error:
        logger.warning("A keeper did not take the state after rollout %d: %s", copy.rollout_id, error)
        return False
    return True


def _fetch(rank: int, rollout_id: int, keeper: Any, timeout_s: float) -> StateCopy:
    """Fetch a copy from a keeper.

    Raises:
        DataError: the keeper has no such copy, or it is damaged.
    """
    described = wait_for(keeper.describe.remote(rank, rollout_id), what="a keeper's copy", timeout_s=timeout_s)
    if described is None:
        raise DataError(f"its keeper has no copy after rollout {rollout_id}")
    header, size, (header_digest, *digests) = described
    data = torch.empty(size, dtype=torch.uint8)
    is_whole = digest_of(header) == header_digest
    coming = keeper.read.remote(rank, rollout_id, 0)
    for index, digest in enumerate(digests):
        begin = index * CHUNK_BYTES
        chunk = wait_for(coming, what="a chunk of a keeper's copy", timeout_s=timeout_s)
        if index + 1 < len(digests):
            coming = keeper.read.remote(rank, rollout_id, begin + CHUNK_BYTES)
        is_whole = is_whole and digest_of(chunk) == digest
        data.numpy()[begin : begin + CHUNK_BYTES] = chunk
    if not is_whole:
        raise DataError(f"the copy after rollout {rollout_id} does not have the digest that it was sent with")
    return StateCopy(rollout_id, header, data)


class MemoryCheckpoints:
    """The driver's side: starts keepers, makes ranks send copies, and tracks the current copy.

    Invariant: every rank's copy after rollout :attr:`newest` is complete in a keeper, unless the keepers that took it
    have died since.
    """

    def __init__(self, flags: CopyFlags) -> None:
        self.newest: int | None = None
        """Rollout of the current copy; None without one."""
        self._flags = flags
        self._keepers: dict[str, Any] = {}
        """Node id -> keeper."""
        self._takers: list[list[Any]] = []
        """For each rank, the keepers that have its copy after :attr:`newest`."""
        self._under_way: tuple[int, list[list[str]], list[ray.ObjectRef]] | None = None
        """Copies being sent: rollout, keeper nodes of each rank, and a reference to each rank's result."""

    @property
    def _timeout_s(self) -> float:
        return self._flags.train_timeout_s

    def begin(self, rollout_id: int, ranks: Sequence[Any]) -> None:
        """If a copy was due after ``rollout_id``, make the ranks send it; does not wait for the sends."""
        if not ranks or not self._flags.is_due(rollout_id):
            return
        nodes = wait_for([rank.node_id.remote() for rank in ranks], what="the ranks' nodes", timeout_s=self._timeout_s)
        around = list(dict.fromkeys(nodes))
        following = dict(zip(around, around[1:] + around[:1], strict=True))
        for node in around:
            if node not in self._keepers:
                where = NodeAffinitySchedulingStrategy(node, soft=False)
                self._keepers[node] = Keeper.options(scheduling_strategy=where).remote()
        places = [list(dict.fromkeys([node, following[node]])) for node in nodes]
        sends = [
            rank.send_copy.remote(number, [self._keepers[node] for node in place], self.newest, self._timeout_s)
            for number, (rank, place) in enumerate(zip(ranks, places, strict=True))
        ]
        self._under_way = rollout_id, places, sends

    def finish_before(self, rollout_id: int) -> None:
        """If training on ``rollout_id`` overwrites copies being sent, wait for these and make them current.

        Raises:
            EngineDiedError: a rank died.
        """
        if self._under_way is not None and self._flags.is_due(rollout_id):
            sends = self._under_way[2]
            self._count(wait_for(sends, what="the copies of the trainer's state", timeout_s=self._timeout_s))

    def _count(self, results: list[list[bool]]) -> None:
        """Make the sent copies current if each rank's copy reached a keeper."""
        assert self._under_way is not None
        (rollout_id, places, _), self._under_way = self._under_way, None
        takers = [
            [self._keepers[node] for node, took in zip(place, result, strict=True) if took]
            for place, result in zip(places, results, strict=True)
        ]
        lost = {node for place, took in zip(places, results, strict=True) for node, ok in zip(place, took) if not ok}
        if all(takers):
            self.newest, self._takers = rollout_id, takers
        for node in lost:
            logger.error("The keeper on node %s is lost; the next copy starts another.", node)
            ray.kill(self._keepers.pop(node))

    def fetch(self, ranks: Sequence[Any], first: int = 0) -> int | None:
        """Make restarted ranks fetch their copies.

        Args:
            ranks: the actor's ranks, or its critic's.
            first: index of the first of them among the ranks given to :meth:`begin`.

        Returns:
            the rollout of the copies; None if the ranks must resume from a checkpoint.
        """
        self._finish_after_death()
        if self.newest is None:
            return None
        began = time.monotonic()
        fetched = [
            rank.fetch_copy.remote(first + number, self.newest, self._takers[first + number], self._timeout_s)
            for number, rank in enumerate(ranks)
        ]
        try:
            wait_for(fetched, what="the copies of the trainer's state", timeout_s=self._timeout_s)
        except DataError as error:
            logger.error("The copies in memory are lost; the trainer resumes from its last checkpoint: %s", error)
            self.drop()
            wait_for([rank.drop_copy.remote() for rank in ranks], what="the ranks", timeout_s=self._timeout_s)
            return None
        logger.warning(
            "The trainer resumes from the copies in memory after rollout %d, fetched in %.1f s.",
            self.newest, time.monotonic() - began,
        )  # fmt: skip
        return self.newest

    def _finish_after_death(self) -> None:
        """Make the copies that were being sent at a rank's death current, if they are complete nevertheless."""
        if self._under_way is None:
            return
        sends = self._under_way[2]
        try:
            if not ray.wait(sends, num_returns=len(sends), timeout=0)[1]:
                self._count(ray.get(sends, timeout=60))
        except RayError as error:
            logger.warning("A copy in memory was not completed: %s", str(error).splitlines()[0])
        self._under_way = None

    def drop(self) -> None:
        """Drop all copies, so that the next start is from a checkpoint."""
        self.newest, self._takers, self._under_way = None, [], None
