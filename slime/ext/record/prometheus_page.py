"""One Prometheus page for the whole job: ``GET /metrics`` at ``--prometheus-port`` of the driver's machine.

It has the latest value of every metric that any process of the job logged (``metrics.jsonl``), the state of the
engines, and the pages of engines and routers with a label that says whose they are.  Names: ``rollout/raw_reward`` is
``slime_rollout_raw_reward``; what names a rank, a layer, a data set or a reason becomes a label; counts of one rollout
are summed, too, under a name that ends in ``_total``.
"""

from __future__ import annotations

import logging
import re
import threading
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from slime.ext.record.job_state import Ask, JobState, job_state
from slime.ext.record.scraping import scraped_families
from slime.flags.observability import TrackingConfig
from slime.flags.security import Trust
from slime.observability.metrics_file import NewRecords, metrics_path
from slime.observability.telemetry import Sink
from slime.ray.utils import listen_address
from slime.utils.errors import ConfigError, DeadlineError
from slime.utils.http_door import PageHandler, PageServer
from slime.utils.http_utils import has_secret
from slime.utils.net import format_host_port, is_loopback

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 5.0
PAGE_S = 30.0
"""For the page that another request has asked for."""
COUNTS = re.compile(
    r"rollout/(groups/(issued|kept|dropped|discarded)|dynamic_filter/drop_.+"
    r"|staleness/(groups_regenerated|tokens_discarded|groups_masked|samples_masked))$|perf/weight_push_bytes$"
)
"""Metrics that count what happened in one rollout."""
_LABELS = (
    (re.compile(r"/layer_(?P<value>\d+)(?=/|$)"), "layer"),
    (re.compile(r"(?<=rank)_(?P<value>\d+)(?=/)"), "rank"),
    (re.compile(r"(?<=/drop)_(?P<value>.+)$"), "reason"),
    (re.compile(r"(?<=/error_cat)/(?P<value>.+)$"), "category"),
)


class LoggedMetrics:
    """The metrics that a run has logged since this object was made: latest values, and sums of counts."""

    def __init__(self, path: Path | None, eval_names: Iterable[str] = ()) -> None:
        self._new = NewRecords(path)
        self._eval_names = sorted(eval_names, key=len, reverse=True)
        self._latest: dict[str, float] = {}
        self._totals: dict[str, float] = defaultdict(float)

    def read(self) -> None:
        """Take in what was logged since the last call."""
        for record in self._new.read():
            for key, value in record.items():
                number = _number(value)
                if number is not None:
                    self._latest[key] = number
                    if COUNTS.match(key):
                        self._totals[key] += number

    def families(self) -> Iterator[Metric]:
        """Yield one family for each name, its samples in the order in which they were first logged."""
        found: dict[str, Metric] = {}
        for kind, values, suffix in (("gauge", self._latest, ""), ("counter", self._totals, "_total")):
            for key, value in values.items():
                name, labels = self._name(key)
                family = found.setdefault(name + suffix, Metric(name, _help(key, kind), kind))
                family.add_sample(name + suffix, labels, value)
        yield from found.values()

    def _name(self, key: str) -> tuple[str, dict[str, str]]:
        labels: dict[str, str] = {}
        if key == "time":
            return "slime_last_record_timestamp_seconds", labels
        for name in self._eval_names:
            if key == f"eval/{name}" or key.startswith((f"eval/{name}/", f"eval/{name}-")):
                key, labels["dataset"] = f"eval/{key.removeprefix(f'eval/{name}')[1:] or 'reward'}", name
                break
        for pattern, label in _LABELS:
            if (match := pattern.search(key)) is not None:
                key, labels[label] = key[: match.start()] + key[match.end() :], match["value"]
        return "slime_" + re.sub(r"[^a-zA-Z0-9_]", "_", key), labels


def _number(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None


def _help(key: str, kind: str) -> str:
    return f"{key} of docs/metrics.md, {'latest' if kind == 'gauge' else 'summed since the job began'}"


def state_families(state: JobState) -> Iterator[Metric]:
    """Yield what the manager knows of its engines."""
    engines = Metric("slime_engines", "Engines by the state of their life", "gauge")
    for name, count in state.engine_states.items():
        engines.add_sample("slime_engines", {"state": name}, count)
    yield engines
    evictions = Metric("slime_engine_evictions", "Engines that were given up or restarted", "counter")
    evictions.add_sample("slime_engine_evictions_total", {}, state.num_evictions)
    yield evictions


class MetricsPage:
    """The server of the page; it answers from a thread of its own until :meth:`stop`."""

    def __init__(
        self,
        port: int,
        logged: LoggedMetrics,
        state: Callable[[], JobState],
        *,
        host: str = "127.0.0.1",
        secret: str | None = None,
    ) -> None:
        """Serve at ``host`` and ``port``; 0 takes a free one, see ``port``.

        Args:
            port: a TCP port.
            logged: the metrics of the run.
            state: asked at every scrape; when it fails, the page has the logged metrics alone.
            host: address of this machine at which the page is served.
            secret: the job's, sent to the engines' pages, and wanted of the clients of this one beyond loopback.

        Raises:
            ConfigError: the port is taken.
        """
        self._logged, self._state = logged, state
        self._secret = secret
        self._making = threading.Lock()
        self._wanted = None if is_loopback(host) else secret
        try:
            self._server = PageServer(host, port, _handler(self))
        except OSError as error:
            raise ConfigError(
                f"--prometheus-port is {port}, which cannot be opened here ({error.strerror}); choose a free port."
            ) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics-page", daemon=True)
        self._thread.start()
        logger.info("metrics of the whole job: http://%s/metrics", format_host_port(host, self.port))

    def collect(self) -> Iterator[Metric]:
        """Yield every family of the page."""
        self._logged.read()
        yield from self._logged.families()
        try:
            state = self._state()
        except Exception as error:  # the edge of a thread: the manager may be ending, and the rest of the page is due
            logger.debug("the page has no engines: %s", error)
            return
        yield from state_families(state)
        yield from scraped_families(state.pages, self._secret)

    def allows(self, authorization: str | None) -> bool:
        """Return True when a request with this header may see the page."""
        return self._wanted is None or has_secret(authorization, self._wanted)

    def text(self) -> bytes:
        """Return the page, in Prometheus' text format; it is made for one client at a time.

        Raises:
            DeadlineError: others wait for it, too, and it takes too long.
        """
        if not self._making.acquire(timeout=PAGE_S):
            raise DeadlineError(f"The page was not ready within {PAGE_S:.0f} s.")
        try:
            return generate_latest(self)
        finally:
            self._making.release()

    def stop(self) -> None:
        """Close the page."""
        self._server.shutdown()
        self._thread.join(SHUTDOWN_TIMEOUT_S)
        self._server.server_close()


def _handler(page: MetricsPage) -> type[PageHandler]:
    class Handler(PageHandler):
        def do_GET(self) -> None:  # noqa: N802  # the name is http.server's
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404, "the page is /metrics")
            elif not page.allows(self.headers.get("Authorization")):
                self.send_error(401, "the page needs the job's secret (--job-secret-file)")
            else:
                try:
                    self.send(200, CONTENT_TYPE_PLAIN_0_0_4, page.text())
                except DeadlineError as error:
                    self.send_error(503, explain=str(error))

    return Handler


class PrometheusSink(Sink):
    """Serves the page from the driver."""

    wants = ("ranks",)

    def __init__(self, args: Namespace, process: str, *, primary: bool) -> None:
        self._ask: Callable[[], JobState] = JobState
        self.page: MetricsPage | None = None
        if primary:
            names = [dataset.name for dataset in args.eval_datasets or ()]
            logged = LoggedMetrics(metrics_path(TrackingConfig.of(args)), names)
            host, secret = listen_address(), Trust.of(args).job_secret
            self.page = MetricsPage(args.prometheus_port, logged, lambda: self._ask(), host=host, secret=secret)

    def offer(self, ask: Ask) -> None:
        self._ask = partial(ask, job_state)

    def close(self) -> None:
        if self.page is not None:
            self.page.stop()
            self.page = None
