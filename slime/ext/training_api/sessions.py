"""Clients: a session lives while its client is heard from, by heartbeats every ten seconds or by other requests."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tinker import types

from slime.ext.training_api.checkpoints import Run
from slime.ext.training_api.errors import Refused
from slime.ext.training_api.queues import ModelQueue
from slime.ext.training_api.samplers import SamplingSession

logger = logging.getLogger(__name__)

MAX_METADATA_BYTES = 64 << 10
MAX_NUMBER = 2**31
"""Of the numbers that a client gives its models and samplers."""


@dataclass(eq=False)
class Model:
    """A model in training."""

    run: Run
    queue: ModelQueue
    task: asyncio.Task[None]


@dataclass(eq=False)
class Session:
    """What a client has here."""

    session_id: str
    owner: str
    user_metadata: dict[str, Any] | None
    display_name: str | None
    heard_at: float = field(default_factory=time.monotonic)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, SamplingSession] = field(default_factory=dict)
    samples: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Sampling requests that are open, by their ids."""


class Sessions:
    """The clients, at most ``limit``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_id: dict[str, Session] = {}

    def create(self, request: types.CreateSessionRequest, owner: str) -> Session:
        """Begin a session.

        Raises:
            Refused: too many clients are here, or the request says too much about its own.
        """
        if len(self._by_id) >= self._limit:
            raise Refused(
                f"{len(self._by_id)} clients are here, as many as may be (--training-api-max-sessions); close one.",
                403,
            )
        metadata = checked_metadata(request.user_metadata)
        checked_metadata({"": request.display_name}, "display_name")
        session = Session(uuid.uuid4().hex, owner, metadata, request.display_name)
        self._by_id[session.session_id] = session
        logger.info("Session %s began.", session.session_id)
        return session

    def of(self, session_id: str, owner: str) -> Session:
        """Return a session, which is heard from now.

        Raises:
            Refused: there is none of ``owner``.
        """
        session = self._by_id.get(session_id)
        if session is None or session.owner != owner:
            raise Refused(f"No session {session_id[:200]!r} is on this server: it has ended, or the server has.", 410)
        session.heard_at = time.monotonic()
        return session

    def with_model(self, model_id: str, owner: str) -> tuple[Session, Model]:
        """Return a model in training and its session, which is heard from now.

        Raises:
            Refused: there is none of ``owner``.
        """
        session = self._by_id.get(model_id.partition(":")[0])
        model = None if session is None or session.owner != owner else session.models.get(model_id)
        if session is None or model is None:
            raise Refused(
                f"No model {model_id[:200]!r} is in training: its session has ended, or the server has. A saved state "
                "can be loaded into a new one.",
                404,
            )
        session.heard_at = time.monotonic()
        return session, model

    def ids_of(self, owner: str) -> list[str]:
        """Return the sessions of ``owner``, the newest first."""
        return [one.session_id for one in reversed(self._by_id.values()) if one.owner == owner]

    def is_here(self, session: Session) -> bool:
        """Return whether a session has not ended."""
        return session.session_id in self._by_id

    def forget(self, session: Session) -> bool:
        """Take a session out; False: somebody else has."""
        return self._by_id.pop(session.session_id, None) is not None

    def silent(self, limit_s: float) -> Iterator[Session]:
        """Yield the sessions that were not heard from for ``limit_s``."""
        now = time.monotonic()
        yield from [one for one in self._by_id.values() if now - one.heard_at > limit_s]


def checked_metadata(metadata: dict[str, Any] | None, name: str = "user_metadata") -> dict[str, Any] | None:
    """Return what a client says about its own.

    Raises:
        Refused: it is too much.
    """
    if metadata is not None and (size := len(json.dumps(metadata))) > MAX_METADATA_BYTES:
        raise Refused(f"{name} has {size} bytes; allowed are {MAX_METADATA_BYTES}.")
    return metadata


def checked_number(number: int | None, name: str) -> int:
    """Return the number that a client gave to a model or a sampler: a part of ids and of folders' names.

    Raises:
        Refused: it is none.
    """
    if number is None or not 0 <= number < MAX_NUMBER:
        raise Refused(f"{name} is {str(number)[:80]}; it must be from 0 to {MAX_NUMBER - 1}.")
    return number
