"""The Grafana dashboard: its schema, and every query of it against a real Prometheus that scrapes a job's page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from slime.ext.record.prometheus_page import MetricsPage
from slime.observability.metrics_file import append_record
from slime.ray.engines.models import JobState, PageSource
from slime.utils.net import get_free_port
from tests.contracts.source_tree import REPO
from tests.ext.record.test_prometheus_page import fetch, page_of, serve

DASHBOARD = json.loads((REPO / "tools/grafana/slime.json").read_text())
PAGES = Path(__file__).parent / "pages"
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
WIDTH = 24

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


def test_no_two_panels_lie_on_each_other():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH
        cells = {(place["x"] + column, place["y"] + row) for column in range(place["w"]) for row in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def log_rollout(path: Path, rollout_id: int) -> None:
    append_record(path, {"rollout/step": rollout_id, **LOGGED})
    append_record(path, {"train/step": rollout_id, **TRAINED})


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetricsPage]:
    """A job's page with an engine and a router; theirs are recorded from real ones."""
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
        served.path = path  # type: ignore[attr-defined]
        yield served


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; Debian's package prometheus has it")
    return found


def test_our_part_of_the_page_passes_prometheus_own_check(page):
    text = "".join(
        line for line in fetch(page).splitlines(keepends=True) if re.match(r"(# (HELP|TYPE) )?slime_", line)
    )
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode in (0, 3), done.stdout + done.stderr  # 3: style, which is not ours to choose for all names
    assert "error" not in done.stderr.lower()


def ask(url: str, **query: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        return json.load(answer)["data"]


@pytest.fixture(scope="module")
def prometheus(page, tmp_path_factory) -> Iterator[str]:
    """A Prometheus that has scraped the page several times, while the run went on."""
    folder, port = tmp_path_factory.mktemp("prometheus"), get_free_port(32000)
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "math", "static_configs": [{"targets": [f"127.0.0.1:{page.port}"]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [tool("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}/api/v1/query"
    try:
        deadline, rollout_id, scraped = time.monotonic() + 90, 1, 0.0
        while scraped < 4:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            time.sleep(1)
            log_rollout(page.path, rollout_id)
            rollout_id += 1
            try:
                found = ask(url, query='count_over_time(slime_rollout_step{job="math"}[1m])')["result"]
            except OSError:
                continue
            scraped = float(found[0]["value"][1]) if found else 0.0
        yield url
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{title}, {query[:40]}" for title, query in QUERIES])
def test_a_query_has_an_answer(prometheus, title, query):
    text = query.replace("$job", ".*").replace("$__rate_interval", "1m")
    result = ask(prometheus, query=text)["result"]
    assert result, f"{title}: {text}"
    assert all(series["value"][1] not in ("NaN", "+Inf") for series in result)


def test_the_jobs_are_those_that_log(prometheus):
    [variable] = [one for one in DASHBOARD["templating"]["list"] if one["name"] == "job"]
    metric = re.fullmatch(r"label_values\((\w+), job\)", variable["query"])
    assert metric is not None
    assert {series["metric"]["job"] for series in ask(prometheus, query=metric[1])["result"]} == {"math"}
