"""Adapters that the engines serve: published when they are asked for, dropped when others need their place."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slime.ext.training_api.backend import Backend
from slime.ext.training_api.errors import Failed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingSession:
    """What a sampling client samples from."""

    sampler_id: str
    session_id: str
    base_model: str
    model_path: str | None = None
    """``tinker://`` path of a saved adapter."""
    source: Path | str | None = None
    """Its folder, or the id of a published snapshot; None: the base model."""


@dataclass(eq=False)
class _Published:
    """An adapter in the engines."""

    name: str
    users: int = 0
    used_at: float = field(default_factory=time.monotonic)


class Samplers:
    """The adapters in the engines, at most ``capacity``.

    Args:
        backend: has the engines.
        capacity: adapters that engines hold.
        timeout_s: for a place to become free.
    """

    def __init__(self, backend: Backend, capacity: int, timeout_s: float) -> None:
        self._backend, self._capacity, self._timeout_s = backend, capacity, timeout_s
        self._published: dict[Path | str, _Published] = {}
        self._num_leaving = 0
        self._publishing = asyncio.Lock()
        self._released = asyncio.Event()
        self._numbers = itertools.count()

    async def publish_model(self, model_id: str, snapshot: str) -> None:
        """Publish the present adapter of a model under the id ``snapshot``."""
        async with self._publishing:
            await self._publish(snapshot, model_id)

    @asynccontextmanager
    async def use(self, source: Path | str | None) -> AsyncIterator[str | None]:
        """Give the name of an adapter in the engines, where it stays for the block; None: the base model.

        Raises:
            Failed: a snapshot that has been dropped, or no place becomes free.
        """
        if source is None:
            yield None
            return
        while source not in self._published:
            if isinstance(source, str):
                raise Failed(
                    f"These weights are no longer in the engines, which hold {self._capacity} adapters "
                    "(--training-api-max-samplers) and drop the one that was not asked for longest. Make a new "
                    "sampling client, or save the weights under a name.",
                    by_user=True,
                )
            async with self._publishing:
                if source not in self._published:
                    await self._publish(source, source)
        entry = self._published[source]
        entry.users += 1
        try:
            yield entry.name
        finally:
            entry.users -= 1
            entry.used_at = time.monotonic()
            self._released.set()

    async def drop(self, source: Path | str) -> None:
        """Take an adapter out of the engines, after the last request that uses it."""
        entry = self._published.pop(source, None)
        if entry is None:
            return
        self._num_leaving += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                while entry.users > 0:
                    await self._next_release()
            await self._backend.drop_sampler(entry.name)
        finally:
            self._num_leaving -= 1
            self._released.set()

    async def _publish(self, source: Path | str, what: Path | str) -> None:
        """Publish ``what``, one at a time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while not self._has_place():
                    await self._next_release()
        except TimeoutError:
            raise Failed(
                f"All {self._capacity} places for adapters in the engines (--training-api-max-samplers) were in use "
                f"for {self._timeout_s:g} s; ask again later."
            ) from None
        if len(self._published) + self._num_leaving >= self._capacity:
            oldest = min(self._idle(), key=lambda one: self._published[one].used_at)
            await self.drop(oldest)
        name = f"sampler-{next(self._numbers)}"
        await self._backend.publish_sampler(what, name)
        self._published[source] = _Published(name)

    async def _next_release(self) -> None:
        self._released.clear()
        await self._released.wait()

    def _has_place(self) -> bool:
        return len(self._published) + self._num_leaving < self._capacity or bool(self._idle())

    def _idle(self) -> list[Path | str]:
        return [source for source, entry in self._published.items() if entry.users == 0]
