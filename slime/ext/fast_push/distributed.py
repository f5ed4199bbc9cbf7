"""Pushes to engines on other GPUs than the trainer's: each pipeline stage broadcasts its parameters.

A stage's sender is its rank 0 of data and tensor parallelism; its group has that rank and all GPUs of all engines.
Stages take turns.

A broadcast needs all members, so one dead engine blocks the rest.  The group is then abandoned, which frees the rest,
the engines to blame are excluded, and the push is repeated over a new group without them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from torch import Tensor

from slime.backends.megatron_utils.update_weight.engine_group import FAREWELL_S, MeetingPlace, OnThread
from slime.ext.fast_push import engine_verbs as verbs
from slime.ext.fast_push.carrier import NO_BUCKET, CarriedPush, Carrier
from slime.ext.fast_push.channel import WeightChannel
from slime.ext.fast_push.loaders import loader_of
from slime.ext.fast_push.manifest import Manifest
from slime.utils import net
from slime.utils.errors import WeightSyncError
from slime.weights.push.engine import EngineProxy
from slime.weights.push.participants import PUSH_FAILURES, Participants, reason_of, start_all, wait_together
from slime.weights.push.state import TrainerRanks

logger = logging.getLogger(__name__)

TRAINERS_SHARE = 0.75
"""Fraction of the engines' deadline after which the trainer gives up; that frees engines that wait for others."""
LEAVING_SHARE, MIN_LEAVING_S = 0.1, 1.0
"""Deadline for leaving a broken group, as a share of the push's deadline; an abandoned engine leaves at once."""
COLLATERAL = "weight group"
"""Text in every error of a ``WeightChannel``, whose cause may be another member."""


class WeightGroup:
    """The engines that one trainer rank reaches by broadcast, in a group with that rank as rank 0."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engines: list[EngineProxy] = []
        """Engines that should be in the group."""
        self.members: list[EngineProxy] = []
        """Engines that are in the group, in rank order, with one rank per GPU."""
        self._channel: WeightChannel | None = None

    def join(self, push: CarriedPush) -> None:
        """Form a group of exactly the engines still in the push, or set ``must_repeat`` to try without failed ones."""
        wanted = [engine for engine in self.engines if push.participants.is_good(engine)]
        self.form(wanted, push.participants)
        if wanted and not self.is_whole:
            push.must_repeat = True

    def send(self, push: CarriedPush, index: int, flat: Tensor) -> None:
        """Broadcast a bucket; after a broken broadcast, do nothing until the push is repeated."""
        if push.must_repeat or push.failures or not self.is_whole:
            return
        try:
            self.broadcast(push.id, index, flat, push.participants)
            push.must_repeat = not self.is_whole
        except PUSH_FAILURES as error:
            push.failures.append(error)  # keep iterating: other ranks gather buckets together with this one

    @property
    def is_whole(self) -> bool:
        return self._channel is not None

    def form(self, engines: Sequence[EngineProxy], participants: Participants) -> None:
        """Form a group of exactly these engines; if some fail to join, exclude them and leave the group incomplete."""
        wanted = list(engines)
        if self._channel is not None and wanted == self.members:
            return
        self.leave(participants)
        self.members = wanted
        if not wanted:
            return
        place = MeetingPlace(wanted)
        timeout_s = participants.clock.step_s
        given_up = threading.Event()
        joining = OnThread(
            lambda: WeightChannel(
                place.address, place.port, rank=0, world_size=place.world_size, backend=place.backend,
                timeout_s=timeout_s * TRAINERS_SHARE, is_cancelled=given_up.is_set,
            ),
            WeightChannel.leave,
        )  # fmt: skip
        requests = start_all(
            wanted,
            lambda engine: engine.run(verbs.join_weight_group, *place.arguments(engine, self.name), loader_of(engine)),
        )
        failures = wait_together(requests, timeout_s, given_up.set)
        if failures:
            joining.drop()
            self._blame(failures, participants, "joining the weight group")
            self.members = []
            return
        channel = joining.result(timeout_s * TRAINERS_SHARE)
        if not isinstance(channel, WeightChannel):
            given_up.set()
            joining.drop()
            raise WeightSyncError(
                f"the trainer could not join the weight group {self.name} at "
                f"{net.format_host_port(place.address, place.port)}, though all {len(wanted)} engines did: {channel}"
            )
        self._channel = channel

    def broadcast(self, push_id: str, bucket_index: int, flat: Tensor, participants: Participants) -> None:
        """Broadcast a bucket to all engines of the group for loading; a failure breaks up the group."""
        channel = self._channel
        assert channel is not None, self.name
        requests = start_all(
            self.members, lambda engine: engine.run(verbs.receive_weight_bucket, push_id, bucket_index, self.name)
        )
        timeout_s = participants.clock.step_s
        failures: dict[int, BaseException] = {}
        is_broken = False

        def give_up() -> None:
            channel.abandon()
            channel.leave()

        try:
            work = channel.start_broadcast(flat)
            freeing = threading.Timer(timeout_s * TRAINERS_SHARE, give_up)
            freeing.start()
            failures = wait_together(requests, timeout_s, give_up)
            freeing.cancel()
            if not failures:
                channel.wait(work, timeout_s)
        except WeightSyncError as error:  # from the trainer's side; leaving shows which engine is to blame
            channel.abandon()
            is_broken = True
            failures = failures or wait_together(requests, timeout_s)
            logger.warning("Bucket %d was not broadcast in group %s: %s", bucket_index, self.name, error)
        if failures or is_broken:
            self._channel = None
            channel.leave()
            self._blame(failures, participants, f"broadcasting bucket {bucket_index}")
            self.members = []

    def _blame(self, failures: dict[int, BaseException], participants: Participants, what: str) -> None:
        """Exclude the engines that broke the group.

        An engine that does not even leave the group is dead or hangs.  Otherwise the engines with errors other than
        the group's are to blame; if all errors come from the group, the engine whose error came first.
        """
        before, clock = len(participants.reasons), participants.clock
        leaving = start_all(self.members, lambda engine: engine.run(verbs.leave_weight_group, self.name))
        timeout_s = min(clock.step_s, max(clock.timeout_s * LEAVING_SHARE, MIN_LEAVING_S))
        for index, error in wait_together(leaving, timeout_s).items():
            participants.exclude(index, f"{reason_of(failures.get(index, error))} (while {what})")
        if len(participants.reasons) > before:
            return
        guilty = [index for index, error in failures.items() if COLLATERAL not in str(error)]
        for index in guilty or list(failures)[:1]:
            participants.exclude(index, f"{reason_of(failures[index])} (while {what})")

    def leave(self, participants: Participants | None = None) -> None:
        """Leave the group, if any.  During a push, engines that are excluded from it are not asked to leave."""
        if self._channel is None:
            return
        channel, self._channel = self._channel, None
        members = [e for e in self.members if participants is None or e in participants.good]
        requests = start_all(members, lambda engine: engine.run(verbs.leave_weight_group, self.name))
        channel.leave()
        wait_together(requests, FAREWELL_S if participants is None else participants.clock.step_s)


class DistributedCarrier(Carrier):
    """Reaches every engine through one process group per pipeline stage (NCCL; gloo on a CPU)."""

    by_stage = True

    def __init__(self, ranks: TrainerRanks) -> None:
        super().__init__(ranks)
        self._group = WeightGroup(f"slime-pp_{ranks.stage}")

    def connect(self, engines: Sequence[EngineProxy]) -> bool:
        """Note the engines on the stage's source; its group forms at the next push.  Slices may be sent."""
        self._group.engines = list(engines) if self.ranks.is_source else []
        return bool(engines)

    def open(self, push: CarriedPush, manifest: Manifest) -> None:
        for stage in range(self.ranks.num_stages):
            is_turn = self.ranks.is_source and stage == self.ranks.stage
            push.run_together(
                f"joining the weight group of pipeline stage {stage}",
                (lambda: self._group.join(push)) if is_turn else None,
            )

    def send(self, push: CarriedPush, index: int, flat: Tensor) -> None:
        if self.ranks.is_source and index != NO_BUCKET:
            self._group.send(push, index, flat)

    def close(self) -> None:
        self._group.leave()
