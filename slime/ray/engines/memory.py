"""Releases and resumes the memory of engines that share GPUs with a trainer.

With fault tolerance, an engine that fails to is replaced, and so is a replacement that fails.  The trainer gets the
GPU once no engine holds memory on it.
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
"""An engine, as its group and its index in the group."""


class SharedMemory:
    """The memory of the engines on the trainers' GPUs.  Without fault tolerance, an engine's failure is raised.

    Args:
        groups: groups of all models; those that share no GPU with a trainer are ignored.
        restart_s: seconds that all attempts to restart an engine may take.
        answer_s: seconds that an engine has to answer.
        is_tolerant: ``--use-fault-tolerance``.
    """

    def __init__(self, groups: Sequence[EngineGroup], *, restart_s: float, answer_s: float, is_tolerant: bool) -> None:
        self._restart_s, self._answer_s, self._is_tolerant = restart_s, answer_s, is_tolerant
        self.groups = [group for group in groups if group.needs_offload]
        """The groups that share GPUs with a trainer."""
        self._released: list[Any] = []
        """Engines asked to release memory since the last :meth:`release` or since the last full :meth:`take_back`."""

    def release(self) -> None:
        """Make every engine release its memory."""
        self._released = []
        self._release(*LIVE)

    def release_started(self) -> None:
        """Make engines that started after :meth:`release` release all memory except the weights."""
        self._release(EngineState.UPDATING, but=["weights"])

    def release_others(self, prepare: Callable[[Sequence[Place]], Sequence[Place]]) -> None:
        """Make the engines that have not done so since :meth:`release` release their memory.

        Args:
            prepare: called with these engines first; returns the ones that are still up.
        """
        self._release(*LIVE, prepare=prepare)

    def take_back(self, tags: Sequence[str] | None) -> None:
        """Make every engine resume the memory with ``tags`` (None: all of it).

        Engines that were removed from their router and wait for no weights get requests again.
        """
        if tags is None or "kv_cache" in tags:
            self._released = []  # the KV cache is resumed last
        done = self.ask("resume_memory_occupation", self._places(*LIVE), tags=tags)
        if tags is None or "kv_cache" in tags:
            for group, index in done:
                if not group.takes_updates and group.states[index] is EngineState.UPDATING:
                    try:
                        group.report(index, EngineEvent.PUSH_DONE)
                    except ProcessError as error:
                        group.report(index, EngineEvent.FAILED, f"its router did not accept it again: {error}")

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
        """Call a method on all engines in parallel; return those that succeed.  Reports or raises failures."""
        asked = [
            (group, index, getattr(engine, method).remote(**keywords))
            for group, index in places
            if (engine := group.engines[index]) is not None  # None: it was evicted and killed meanwhile
        ]
        deadline_s, done = time.monotonic() + self._answer_s, []
        for group, index, ref in asked:
            # If one engine uses up the time, the answers of the others still count.
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
