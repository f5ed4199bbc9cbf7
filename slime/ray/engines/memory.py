"""Memory of the engines that share GPUs with a trainer: they release it, and take it back.

With fault tolerance an engine that fails in it is replaced, and so is one in its place that fails: the trainer gets
the GPU once nothing else has memory on it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
        self._groups = [group for group in groups if group.needs_offload]
        self._released: list[Any] = []
        """The engines told to release their memory since the last :meth:`release`, or since all got all of it back."""

    def release(self) -> None:
        """Have every engine release its memory."""
        self._released = []
        self._release(*LIVE)

    def release_started(self) -> None:
        """Have the engines that started after :meth:`release` release their memory too, except for the weights."""
        self._release(EngineState.UPDATING, but=["weights"])

    def may_lend(self, *, is_stuck: bool) -> bool:
        """Return whether a trainer that died may start on these GPUs during a rollout.

        Args:
            is_stuck: no request to the trained model is answered before it gets weights, whoever else serves: engines
                of other models, or those that prefill without one that decodes.
        """
        states = {state for group in self._groups for state in group.states}
        return not states - ({*LIVE, EngineState.RETIRED} if is_stuck else {EngineState.UPDATING, EngineState.RETIRED})

    def lend(self) -> None:
        """Have the engines release their memory during a rollout; those that serve get no request from now on.

        What they are answering comes first, except from the trained model: nothing comes of a request to that.
        """
        self._release(*LIVE, withdraws=True)

    def take_back(self, tags: Sequence[str] | None) -> None:
        """Have every engine take the memory of ``tags`` (None: all of it) back.

        Those that :meth:`lend` took from their router, and that wait for no weights, get requests again.
        """
        if tags is None:
            self._released = []
        done = self._ask("resume_memory_occupation", self._places(*LIVE), tags=tags)
        if tags is None or "kv_cache" in tags:
            for group, index in done:
                if not group.takes_updates and group.states[index] is EngineState.UPDATING:
                    try:
                        group.report(index, EngineEvent.PUSH_DONE)
                    except ProcessError as error:
                        group.report(index, EngineEvent.FAILED, f"its router did not take it in again: {error}")

    def _release(self, *states: EngineState, but: Sequence[str] = (), withdraws: bool = False) -> None:
        deadline_s = time.monotonic() + self._restart_s
        while True:
            for group in self._groups if self._is_tolerant else ():
                group.wait_settled(max(deadline_s - time.monotonic(), MIN_WAIT_S))
            fresh = [(group, k) for group, k in self._places(*states) if group.engines[k] not in self._released]
            if not fresh:
                return
            self._released += [group.engines[index] for group, index in fresh]
            if withdraws:
                fresh = self._withdraw(fresh)
            done = self._ask("release_memory_occupation", fresh)
            if but:
                self._ask("resume_memory_occupation", done, tags=but)

    def _withdraw(self, places: Sequence[Place]) -> list[Place]:
        """Let engines get no request; return those of ``places`` that are still up."""
        serving = [(group, index) for group, index in places if group.states[index] is not EngineState.UPDATING]
        for group, index in serving:
            group.report(index, EngineEvent.PUSH_STARTED)
            group.delist(index)
        self._ask("abort_all", [(group, index) for group, index in serving if group.takes_updates])
        return [(group, index) for group, index in places if group.states[index] is EngineState.UPDATING]

    def _places(self, *states: EngineState) -> list[Place]:
        return [(group, index) for group in self._groups for index in group.indices(*states)]

    def _ask(self, method: str, places: Sequence[Place], **keywords: Any) -> list[Place]:
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
