"""Memory of the engines that share GPUs with a trainer: they release it, and take it back.

With fault tolerance an engine that fails in it is replaced, and so is one in its place that fails: the trainer gets
the GPU once nothing else has memory on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ray.exceptions import RayError

from slime.ray.engines.deadlines import MIN_WAIT_S
from slime.ray.engines.group import EngineGroup
from slime.ray.engines.lifecycle import LIVE, EngineEvent, EngineState
from slime.ray.waiting import wait_for
from slime.utils.errors import ProcessError

Place = tuple[EngineGroup, int]
"""An engine as its group and its index there."""


class SharedMemory:
    """The memory of the engines on the trainers' GPUs; an engine that fails raises without fault tolerance.

    Args:
        groups: of all models; those that share no GPU with a trainer are left alone.
        restart_s: the time that all attempts to restart an engine may take.
        answer_s: the time that an engine has for its answer.
        is_tolerant: ``--use-fault-tolerance``.
    """

    def __init__(self, groups: Sequence[EngineGroup], *, restart_s: float, answer_s: float, is_tolerant: bool) -> None:
        self._restart_s, self._answer_s, self._is_tolerant = restart_s, answer_s, is_tolerant
        self.groups = [group for group in groups if group.needs_offload]
        """Those that share GPUs with a trainer."""
        self._released: list[Any] = []
        """The engines told to release their memory since the last :meth:`release`, or since all got all of it back."""

    def release(self) -> None:
        """Have every engine release its memory."""
        self._released = []
        self._release(*LIVE)

    def release_started(self) -> None:
        """Have the engines that started after :meth:`release` release their memory too, except for the weights."""
        self._release(EngineState.UPDATING, but=["weights"])

    def release_others(self, prepare: Callable[[Sequence[Place]], Sequence[Place]]) -> None:
        """Have the engines release their memory that did not since :meth:`release`.

        Args:
            prepare: gets them before, and gives those that are still up.
        """
        self._release(*LIVE, prepare=prepare)

    def take_back(self, tags: Sequence[str] | None) -> None:
        """Have every engine take the memory of ``tags`` (None: all of it) back.

        Those that wait for no weights, and were taken from their router, get requests again.
        """
        if tags is None or "kv_cache" in tags:
            self._released = []  # the KV cache comes last
        done = self.ask("resume_memory_occupation", self._places(*LIVE), tags=tags)
        if tags is None or "kv_cache" in tags:
            for group, index in done:
                if not group.takes_updates and group.states[index] is EngineState.UPDATING:
                    try:
                        group.report(index, EngineEvent.PUSH_DONE)
                    except ProcessError as error:
                        group.report(index, EngineEvent.FAILED, f"its router did not take it in again: {error}")

    def _release(
        self,
        *states: EngineState,
        but: Sequence[str] = (),
        prepare: Callable[[Sequence[Place]], Sequence[Place]] = list,
    ) -> None:
        deadline_s = time.monotonic() + self._restart_s
        while True:
            for group in self.groups if self._is_tolerant else ():
                group.wait_settled(max(deadline_s - time.monotonic(), MIN_WAIT_S))
            fresh = [(group, k) for group, k in self._places(*states) if group.engines[k] not in self._released]
            if not fresh:
                return
            self._released += [group.engines[index] for group, index in fresh]
            done = self.ask("release_memory_occupation", prepare(fresh))
            if but:
                self.ask("resume_memory_occupation", done, tags=but)

    def _places(self, *states: EngineState) -> list[Place]:
        return [(group, index) for group in self.groups for index in group.indices(*states)]

    def ask(self, method: str, places: Sequence[Place], **keywords: Any) -> list[Place]:
        """Call a method of engines at once, and return those that did it; with fault tolerance report the others."""
        asked = [
            (group, index, getattr(engine, method).remote(**keywords))
            for group, index in places
            if (engine := group.engines[index]) is not None  # else it was evicted meanwhile, and killed
        ]
        deadline_s, done = time.monotonic() + self._answer_s, []
        for group, index, ref in asked:
            # The answers of the others still count when one took all the time.
            timeout_s = max(deadline_s - time.monotonic(), MIN_WAIT_S)
            try:
                wait_for(ref, what=f"{method} of {group.name_of(index)}", timeout_s=timeout_s)
            except (ProcessError, RayError) as error:
                if not self._is_tolerant:
                    raise
                group.report(index, EngineEvent.FAILED, str(error))
            else:
                done.append((group, index))
        return done
