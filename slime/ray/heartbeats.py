"""Trainer ranks that neither die nor go on: stopped processes, machines that froze, GPUs that hang."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from slime.backends.train_worker import Beat
from slime.utils.errors import HangError


class Heartbeats:
    """Asks the ranks of a trainer how far they are while the driver waits for them.

    Args:
        ranks: their actors by name.
        hang_timeout_s: seconds that a rank may be silent, or beyond twice the longest time that what it does took.
    """

    def __init__(self, ranks: Mapping[str, Any], hang_timeout_s: float) -> None:
        self._ranks, self._timeout_s = ranks, hang_timeout_s
        self._beats: dict[str, Beat] = {}
        self._asked: dict[str, tuple[ray.ObjectRef, float]] = {}

    def begin(self) -> None:
        """Forget what was asked before: nobody has listened since."""
        self._asked.clear()

    def check(self) -> None:
        """Take the answers that have come and ask again; to be called every few seconds, and never blocks.

        Raises:
            HangError: a rank is silent or does not go on; names the one that is behind.
        """
        now = time.monotonic()
        for name, actor in self._ranks.items():
            if name in self._asked and ray.wait([self._asked[name][0]], timeout=0)[0]:
                self._beats[name] = self._answer(self._asked.pop(name)[0], name)
            if name not in self._asked:
                self._asked[name] = actor.beat.remote(), now
        silent_s = {name: now - asked_at for name, (_, asked_at) in self._asked.items()}
        silent = max(silent_s, key=lambda name: silent_s[name])
        overdue = [name for name, beat in self._beats.items() if beat.overdue_s() > self._timeout_s]
        if silent_s[silent] > self._timeout_s or (overdue and silent_s[silent] > self._timeout_s / 2):
            raise HangError(
                f"{silent} has not answered for {silent_s[silent]:.0f} s (--trainer-hang-timeout-s "
                f"{self._timeout_s:g}): its process is stopped, or its node is. {self._where()}"
            )
        if overdue:
            behind = min(self._beats, key=lambda name: self._beats[name].num_marks)
            beat = self._beats[overdue[0]]
            raise HangError(
                f"{overdue[0]} has been in a {beat.phase} for {beat.elapsed_s:.0f} s; the longest took "
                f"{beat.longest_s:.1f} s; --trainer-hang-timeout-s allows {self._timeout_s:g} s beyond twice that. "
                f"The rank that is behind the others is {behind}. {self._where()}"
            )

    def _answer(self, ref: ray.ObjectRef, name: str) -> Beat:
        try:
            return ray.get(ref, timeout=10)
        except RayError:  # it died, which the wait beside this one reports
            return self._beats.get(name, Beat(0, None, 0.0, None))

    def _where(self) -> str:
        """Return the positions of the slowest ranks, as text."""
        slowest = sorted(self._beats.items(), key=lambda item: item[1].num_marks)[:4]
        return "Slowest first: " + "; ".join(
            f"{name} at mark {beat.num_marks} ({beat.phase or 'between steps'})" for name, beat in slowest
        )
