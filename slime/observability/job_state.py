"""Facts of the rollout manager for the job's Prometheus page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PageSource:
    """A page that is put into the job's own."""

    url: str
    labels: Mapping[str, str]
    """Of every sample on it; the first two name it."""

    @property
    def name(self) -> str:
        """A description of the server that has the page."""
        return " ".join(self.labels.values())


@dataclass(frozen=True, slots=True)
class JobState:
    """The engines and routers of a job at one moment."""

    pages: Sequence[PageSource] = ()
    engine_states: Mapping[str, int] = field(default_factory=dict)
    """Engines in each state of their life."""
    num_evictions: int = 0
    """Engines that were given up or restarted since the job began."""
