"""Timelines of rollout dumps, profiles of engines, and their summaries."""

from __future__ import annotations

import gzip
import json
import queue
import threading
import urllib.request

import pytest

from slime.observability.dumps import save_rollout_dump
from slime.observability.trace_utils import trace_span
from slime.utils.types import Sample
from tests.scripted_engine.server import ScriptedEngine
from tools import analyze_profile, profile_rollout, trace_timeline_viewer


@pytest.fixture
def dump(tmp_path):
    samples = [Sample(index=i, group_index=i // 2) for i in range(4)]
    for sample in samples:
        with trace_span(sample, "generate_and_rm"), trace_span(sample, "</script>"):
            pass
    return save_rollout_dump(str(tmp_path / "{rollout_id}.pt"), 3, samples)


def test_a_dump_becomes_a_trace_and_a_page(dump):
    trace, page = trace_timeline_viewer.build(dump)
    document = json.loads(trace.read_text())
    assert [event["name"] for event in document["traceEvents"] if event["ph"] == "X"].count("generate_and_rm") == 4
    html = page.read_text()
    assert trace_timeline_viewer.DATA_MARK not in html and html.count("</script>") == 1
    data = json.loads(html.split("const data = ", 1)[1].split(";\n", 1)[0])
    assert [(row["group"], row["sample"]) for row in data["rows"]] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert [one[3] for one in data["rows"][0]["slices"]] == [0, 1] and data["seconds"] > 0


def test_the_viewer_serves_the_page_on_localhost_and_nothing_beside_it(dump, monkeypatch):
    trace, page = trace_timeline_viewer.build(dump)
    printed: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(trace_timeline_viewer, "say", printed.put)
    thread = threading.Thread(target=trace_timeline_viewer.serve, args=(page, 0), daemon=True)
    thread.start()
    address = printed.get(timeout=60).split()[0]
    for path in ("", page.name, trace.name, dump.name):
        with urllib.request.urlopen(f"{address}{path}", timeout=60) as answer:
            assert answer.read() == page.read_bytes()


def test_every_worker_is_told_to_profile(capsys):
    with ScriptedEngine() as engine:
        profile_rollout.main(
            ["--router-url", engine.url, "--action", "start", "--output-dir", "/tmp/x", "--with-stack"]
        )
        profile_rollout.main(["--router-url", engine.url, "--action", "stop"])
    (start, body), (stop, nothing) = engine.control
    assert (start, stop) == ("/start_profile", "/stop_profile") and not nothing
    assert body == {
        "output_dir": "/tmp/x",
        "num_steps": 3,
        "profile_by_stage": False,
        "with_stack": True,
        "record_shapes": False,
    }
    assert "Start profiling." in capsys.readouterr().out


def slice_of(name, category, start, microseconds):
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": microseconds}


def test_a_profile_is_summed_up_by_operation(tmp_path, capsys):
    events = [
        slice_of("gemm", "kernel", 0, 100),
        slice_of("gemm", "kernel", 50, 100),
        slice_of("ncclDevKernel_AllReduce", "kernel", 200, 50),
        slice_of("Memcpy HtoD", "gpu_memcpy", 300, 10),
        slice_of("aten::mm", "cpu_op", 0, 400),
        {"ph": "M", "name": "process_name"},
    ]
    path = tmp_path / "host-rank1.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events, "distributedInfo": {"rank": 1}}, file)
    summary = analyze_profile.summarise(path)
    assert (summary.rank, summary.span_us, summary.busy_us) == (1, 400.0, 150 + 50 + 10)
    assert {name: (t.kind, t.microseconds, t.calls) for name, t in summary.totals.items()} == {
        "gemm": ("kernel", 200.0, 2),
        "ncclDevKernel_AllReduce": ("communication", 50.0, 1),
        "Memcpy HtoD": ("copy", 10.0, 1),
        "aten::mm": ("operator", 400.0, 1),
    }
    analyze_profile.main(["--profile-dir", str(tmp_path), "--rank", "1", "--top-n", "2"])
    shown = capsys.readouterr().out
    assert "aten::mm" in shown and "gemm" in shown and "Memcpy" not in shown and "busy 52%" in shown
    with pytest.raises(SystemExit):
        analyze_profile.main(["--profile-dir", str(tmp_path)])
    assert "there are [1]" in capsys.readouterr().err
