"""Facts of the rollout manager for the job's Prometheus page."""

from __future__ import annotations

import http.client
import logging
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 5.0
"""For one engine's or router's page."""
LARGEST_PAGE = 1 << 24


@dataclass(frozen=True, slots=True)
class PageSource:
    """A page that is put into the job's own."""

    url: str
    labels: Mapping[str, str]
    """Of every sample on it; the first two name it."""
    text: str | None = None
    """The page, where it has been read already; empty when it did not answer."""

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


def read_page(url: str, secret: str | None = None) -> str | None:
    """Return the text of a Prometheus page; None where it does not answer."""
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(url, headers=headers), timeout=SCRAPE_TIMEOUT_S) as answer:
            return answer.read(LARGEST_PAGE).decode()
    except (OSError, ValueError, http.client.HTTPException) as error:  # the last one of a page that is cut off
        logger.debug("%s shows no metrics: %s", url, error)
        return None
