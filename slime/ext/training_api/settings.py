"""What a service serves, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime.ext.training_api.wire import TextLimits


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Model, folder and quotas of a service."""

    model_name: str
    """By which clients ask for the base model."""
    limits: TextLimits
    folder: Path
    """Of the saved states."""
    max_rank: int
    max_models: int = 32
    max_sessions: int = 64
    max_samplers: int = 32
    session_timeout_s: float = 300.0
    """A session ends when its client was not heard from for so long."""
    request_timeout_s: float = 1800.0
    """For each call of the backend."""
    tokens_per_call: int = 65536
    """Of the passes that are given to the trainer together."""
