"""The Prometheus page of a job: names, labels and sums by hand, included engine pages, and omitted failures."""

from __future__ import annotations

import http.server
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slime.ext.record.job_state import JobState, PageSource
from slime.ext.record.prometheus_page import LoggedMetrics, MetricsPage
from slime.observability.metrics_file import append_record
from slime.utils.errors import ConfigError
from slime.utils.net import get_free_port

ENGINE_PAGE = """\
# HELP sglang:num_queue_reqs The number of requests in the waiting queue.
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 3.0
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m"} 128.0
"""


@contextmanager
def serve(text: str) -> Iterator[str]:
    """A server whose page is ``text``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def page_of(path: Path, state: Any = JobState, eval_names: tuple[str, ...] = ()) -> Iterator[MetricsPage]:
    page = MetricsPage(0, LoggedMetrics(path, eval_names), state)
    try:
        yield page
    finally:
        page.stop()


def fetch(page: MetricsPage, path: str = "/metrics") -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{page.port}{path}", timeout=30) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return answer.read().decode()


def samples(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_the_latest_value_of_each_metric_is_shown_and_counts_are_summed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_record(path, {"rollout/step": 0, "rollout/raw_reward": 0.1, "rollout/groups/dropped": 100})  # earlier
    with page_of(path) as page:
        append_record(path, {"rollout/step": 1, "rollout/raw_reward": 0.25, "rollout/groups/dropped": 3})
        append_record(path, {"rollout/step": 2, "rollout/raw_reward": 0.5, "rollout/groups/dropped": 4})
        append_record(path, {"train/step": 7, "train/loss": float("nan"), "run/start": "id", "is": True})
        found = samples(fetch(page))
        assert (found["slime_rollout_step"], found["slime_train_step"]) == (2, 7)
        assert found["slime_rollout_raw_reward"] == 0.5
        assert (found["slime_rollout_groups_dropped"], found["slime_rollout_groups_dropped_total"]) == (4, 7)
        assert found["slime_train_loss"] != found["slime_train_loss"]
        assert found["slime_last_record_timestamp_seconds"] > 1.7e9
        assert not any("run_start" in name for name in found)
        append_record(path, {"rollout/step": 3, "rollout/groups/dropped": 1})
        assert samples(fetch(page))["slime_rollout_groups_dropped_total"] == 8


def test_ranks_layers_data_sets_and_reasons_are_labels(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with page_of(path, eval_names=("aime", "aime-2024")) as page:
        append_record(
            path,
            {
                "train/step": 1,
                "train/expert_load/layer_3/max_over_mean": 2.0,
                "train/expert_load/layer_12/max_over_mean": 1.5,
                "train/expert_load/worst_max_over_mean": 2.0,
                "perf/rank_11/tok_per_s": 700.0,
                "perf/critic-rank_0/tok_per_s": 900.0,
                "eval/aime": 0.25,
                "eval/aime-2024": 0.5,
                "eval/aime-2024-truncated_ratio": 0.125,
                "eval/aime/response_len/mean": 70,
                "rollout/dynamic_filter/drop_zero_std_0.0": 5,
            },
        )
        found = samples(fetch(page))
    assert found['slime_train_expert_load_max_over_mean{layer="3"}'] == 2.0
    assert found['slime_train_expert_load_max_over_mean{layer="12"}'] == 1.5
    assert found["slime_train_expert_load_worst_max_over_mean"] == 2.0
    assert found['slime_eval_reward{dataset="aime"}'] == 0.25
    assert found['slime_eval_reward{dataset="aime-2024"}'] == 0.5
    assert found['slime_eval_truncated_ratio{dataset="aime-2024"}'] == 0.125
    assert found['slime_eval_response_len_mean{dataset="aime"}'] == 70
    assert found['slime_rollout_dynamic_filter_drop_total{reason="zero_std_0.0"}'] == 5


def test_pages_of_engines_are_put_in_with_their_labels(tmp_path):
    with serve(ENGINE_PAGE) as url:
        labels = [{"engine": str(index), "worker_type": "regular"} for index in range(3)]
        nobody = f"http://127.0.0.1:{get_free_port(31000)}/metrics"
        pages = [PageSource(url, labels[0]), PageSource(url, labels[1]), PageSource(nobody, labels[2])]
        with page_of(tmp_path / "none.jsonl", lambda: JobState(pages, {"serving": 2, "restarting": 1}, 4)) as page:
            text = fetch(page)
    found = samples(text)
    for index in (0, 1):
        ours = f'engine="{index}"'
        assert found[f'sglang:num_queue_reqs{{{ours},model_name="m",tp_rank="0",worker_type="regular"}}'] == 3
        assert found[f'sglang:prompt_tokens_total{{{ours},model_name="m",worker_type="regular"}}'] == 128
    assert text.count("# TYPE sglang:num_queue_reqs gauge") == 1
    assert [found[f'slime_scrape_success{{source="{index} regular"}}'] for index in range(3)] == [1, 1, 0]
    assert (found['slime_engines{state="serving"}'], found['slime_engines{state="restarting"}']) == (2, 1)
    assert found["slime_engine_evictions_total"] == 4


HOSTILE_PAGE = """\
slime_train_loss 5
slime_rollout_raw_reward{dataset="x"} 6
# TYPE slime_engines gauge
slime_engines{state="serving"} 99
# TYPE slime counter
slime_total 7
slime_scrape_success{source="0 regular"} 0
# TYPE sglang:ok gauge
sglang:ok{engine="1",router="default",slime_model="other",worker_type="x",kind="a"} 1 4102444800000
{"sglang:x\\nslime_train_loss 8"} 1
sglang:y{"a\\nslime_train_loss"="9"} 1
"""


def test_a_page_of_an_engine_shows_no_figures_of_the_job_and_none_of_another_server(tmp_path):
    path = tmp_path / "metrics.jsonl"
    labels = {"engine": "0", "worker_type": "regular", "slime_model": "default"}
    pages = [PageSource("", labels, HOSTILE_PAGE), PageSource("", {"router": "default"}, "")]
    with page_of(path, lambda: JobState(pages, {"serving": 1})) as page:
        append_record(path, {"train/step": 1, "train/loss": 0.5})
        text = fetch(page)
    found = samples(text)
    assert {name: value for name, value in found.items() if not name.startswith("slime_scrape")} == {
        "slime_train_step": 1,
        "slime_train_loss": 0.5,
        "slime_last_record_timestamp_seconds": found["slime_last_record_timestamp_seconds"],
        'slime_engines{state="serving"}': 1,
        "slime_engine_evictions_total": 0,
        'sglang:ok{engine="0",kind="a",slime_model="default",worker_type="regular"}': 1,
        'sglang:y{engine="0",slime_model="default",worker_type="regular"}': 1,
    }
    assert text.count("slime_train_loss") == 3  # help, type and value
    assert "4102444800000" not in text


def test_without_the_manager_the_page_has_what_was_logged(tmp_path):
    def fails() -> JobState:
        raise TimeoutError("the manager is busy")

    path = tmp_path / "metrics.jsonl"
    with page_of(path, fails) as page:
        append_record(path, {"train/step": 1, "train/loss": 0.5})
        assert samples(fetch(page))["slime_train_loss"] == 0.5


def test_a_port_that_is_taken_is_named(tmp_path):
    told = "--prometheus-port is .*, which cannot be opened here"
    with page_of(tmp_path / "metrics.jsonl") as page, pytest.raises(ConfigError, match=told):
        MetricsPage(page.port, LoggedMetrics(None), JobState)
