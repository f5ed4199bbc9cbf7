"""The engines and routers of a job at one moment, as the rollout manager knows them, and their Prometheus pages."""

from __future__ import annotations

import http.client
import logging
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime.ray.engines.lifecycle import LIVE

if TYPE_CHECKING:
    from slime.ray.engines.fleet import EngineFleet
    from slime.ray.engines.models import RolloutServer

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 5.0
"""For one engine's or router's page."""
LARGEST_PAGE = 1 << 24

Ask = Callable[[Callable[["EngineFleet"], Any]], Any]
"""Returns what a function returns of the engines, in the process of the manager."""


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


def job_state(fleet: EngineFleet) -> JobState:
    """Return the state of engines and routers, and where their pages are."""
    pages = [page for server in fleet.servers for page in _pages_of(server)]
    states = Counter(state.value for group in fleet.groups for state in group.states)
    return JobState(pages, states, sum(group.num_evictions for group in fleet.groups))


def _pages_of(server: RolloutServer) -> list[PageSource]:
    """Return the Prometheus pages of a model's router and of its engines that are up."""
    pages = []
    if server.router is not None and server.router.metrics_url is not None:
        # Its page has no key and is on this host's loopback: it is read here for the driver.
        page = server.router.metrics_url
        pages.append(PageSource(page, {"router": server.config.name}, read_page(page) or ""))
    for group in server.groups:
        for index in group.indices(*LIVE):
            labels = {"engine": str(group.rank_offset + index), "worker_type": group.config.worker_type}
            if (url := group.urls[index]) is not None:
                pages.append(PageSource(f"{url}/metrics", {**labels, "slime_model": server.config.name}))
    return pages


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
