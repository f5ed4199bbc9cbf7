"""The Grafana dashboard: its schema, and that a job's page has every metric that it queries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from slime.ext.record.job_state import JobState, PageSource
from slime.ext.record.prometheus_page import MetricsPage
from slime.observability.metrics_file import append_record
from tests.contracts.source_tree import REPO
from tests.ext.record.test_prometheus_page import fetch, page_of, samples, serve

DASHBOARD = json.loads((REPO / "tools/grafana/slime.json").read_text())
PAGES = Path(__file__).parent / "pages"
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
LOGGED = {
    "perf/rollout_tok_per_s": 4100.0, "perf/train_tok_per_s": 7900.0, "perf/time_step_s": 3.9,
    "perf/time_rollout_s": 1.9, "perf/time_push_s": 0.25, "perf/weight_push_s": 0.2, "perf/weight_push_bytes": 1e9,
    "perf/train_peak_memory_gib": 31.5, "rollout/raw_reward": 0.68, "rollout/staleness/mean": 0.5,
    "rollout/staleness/max": 2.0, "rollout/groups/issued": 40, "rollout/groups/kept": 32, "rollout/groups/dropped": 7,
    "rollout/groups/discarded": 1, "rollout/groups/in_flight": 12, "rollout/groups/ready": 3,
    "rollout/dynamic_filter/drop_zero_std_1.0": 7, "eval/aime": 0.3, "perf/rank_0/step_s": 1.5,
    "perf/rank_0/peak_memory_gib": 30.0,
}  # fmt: skip
TRAINED = {
    "train/loss": 0.01, "train/grad_norm": 0.4, "train/train_rollout_logprob_abs_diff": 0.002,
    "train/expert_load/layer_1/max_over_mean": 1.5, "train/expert_load/layer_1/idle": 0.0,
    "train/expert_load/layer_2/max_over_mean": 2.5, "train/expert_load/layer_2/idle": 0.125,
    "train/expert_load/worst_max_over_mean": 2.5, "train/expert_load/worst_idle": 0.125,
}  # fmt: skip


def test_the_dashboard_has_what_grafana_imports():
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time"} <= set(DASHBOARD)
    assert DASHBOARD["schemaVersion"] >= 36  # Grafana 9
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert [one["name"] for one in DASHBOARD["templating"]["list"]] == ["datasource", "job"]
    for panel in PANELS:
        assert panel["type"] == "timeseries" and panel["title"] and panel["targets"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH")[: len(panel["targets"])]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert sources == [{"type": "prometheus", "uid": "${datasource}"}] * len(sources)
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])


def log_rollout(path: Path, rollout_id: int) -> None:
    append_record(path, {"rollout/step": rollout_id, **LOGGED})
    append_record(path, {"train/step": rollout_id, **TRAINED})


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetricsPage]:
    """A job's page with an engine and a router; their pages are recorded from real ones."""
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    with ExitStack() as stack:
        engine, router = (stack.enter_context(serve((PAGES / name).read_text())) for name in ("engine", "router"))
        pages = [
            PageSource(router, {"router": "default"}),
            PageSource(engine, {"engine": "0", "worker_type": "regular", "slime_model": "default"}),
        ]
        state = JobState(pages, {"serving": 1}, 0)
        served = stack.enter_context(page_of(path, lambda: state, eval_names=("aime",)))
        log_rollout(path, 0)
        yield served


def test_a_job_shows_every_metric_that_the_dashboard_asks_for(page):
    shown = {name.partition("{")[0] for name in samples(fetch(page))}
    for title, query in QUERIES:
        asked = set(re.findall(r"(?:slime_|sglang:|smg_)[\w.+]+", query))
        assert asked, title
        assert not [name for name in asked if not any(re.fullmatch(name, one) for one in shown)], title
