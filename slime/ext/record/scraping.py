"""The Prometheus pages of a job's engines and routers, read and put together."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from slime.ext.record.job_state import PageSource, read_page

logger = logging.getLogger(__name__)

NUM_SCRAPERS = 16
OWN = "slime_"
"""Begins the names of the job's own figures and labels; no page of an engine can show any."""
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)


def scraped_families(sources: Sequence[PageSource], secret: str | None = None) -> Iterator[Metric]:
    """Yield the families of all pages, those of one name as one; and which pages answered.

    A page has no say in what the job says itself: figures with a name of the job's, and labels that name a server.
    """
    scrape = functools.partial(_scrape, secret=secret)
    labels_of_job = {name for source in sources for name in source.labels}
    found: dict[str, Metric] = {}
    answered = Metric("slime_scrape_success", "1 where an engine or router showed its metrics", "gauge")
    with ThreadPoolExecutor(NUM_SCRAPERS, thread_name_prefix="scrape") as pool:
        for source, families in zip(sources, pool.map(scrape, sources), strict=True):
            answered.add_sample("slime_scrape_success", {"source": source.name}, float(families is not None))
            for family in families or ():
                if not _is_foreign(family.name):
                    continue
                known = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    labels = {k: v for k, v in sample.labels.items() if k not in labels_of_job and _is_foreign(k)}
                    if _is_foreign(sample.name):
                        known.add_sample(sample.name, {**labels, **source.labels}, sample.value)
    yield from found.values()
    yield answered


def _is_foreign(name: str) -> bool:
    """Return True for a name of a metric or a label that an engine's page may use."""
    return _NAME.fullmatch(name) is not None and not name.startswith(OWN)


def _scrape(source: PageSource, secret: str | None) -> list[Metric] | None:
    """Return the families of a page; None where it does not answer."""
    text = read_page(source.url, secret) if source.text is None else source.text
    try:
        return list(text_string_to_metric_families(text)) if text else None
    except ValueError as error:
        logger.debug("%s is no Prometheus page: %s", source.url, error)
        return None
