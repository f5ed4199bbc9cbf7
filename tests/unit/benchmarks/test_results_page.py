"""Measurements are read, replaced and shown unchanged."""

from __future__ import annotations

import json

import pytest

from benchmarks import results_page

RUN = {
    "title": "A run",
    "group": "Rollout",
    "date": "2026-01-02",
    "hardware": "a machine",
    "versions": {"torch": "2", "numpy": "1"},
    "command": "python x.py",
    "commit": None,
    "notes": ["A note."],
    "tables": [{"title": "kept", "columns": ["a"], "rows": [["x"]]}],
}


@pytest.fixture
def folder(tmp_path):
    results_page.save("run", RUN, tmp_path)
    (tmp_path / "not_run.json").write_text(json.dumps({"not_run": ["Mars."]}))
    return tmp_path


def test_text_is_split_into_notes_and_tables_with_numbers():
    text = "One\nnote.\n\n## t\n\n| a | b |\n|---|---|\n| **1,575** | x \\| y |\n| 2e-07 | -0.5 |\n"
    notes, tables = results_page.parse(text)
    assert notes == ["One note."]
    assert tables == [{"title": "t", "columns": ["a", "b"], "rows": [[1575, "x | y"], [2e-07, -0.5]]}]


def test_a_new_measurement_replaces_its_table_and_keeps_the_others(folder):
    results_page.record("run", "## new\n\n| a |\n|---|\n| 3 |\n", folder, hardware="another machine")
    run = results_page.load(folder)["run"]
    assert [table["title"] for table in run["tables"]] == ["new", "kept"]
    assert run["hardware"] == "another machine" and run["notes"] == ["A note."]


def test_a_part_that_is_measured_again_replaces_its_rows_alone(folder, monkeypatch):
    rows = [["x", "TP1", 1], ["y", "TP1", 2], ["z", "TP1", 3], ["z", "TP2", 4]]
    table = {"title": "kept", "columns": ["a", "engine", "b"], "rows": rows}
    results_page.save("run", {**RUN, "tables": [table]}, folder)
    head = "## kept\n\n| a | engine | c |\n|---|---|---|\n"
    monkeypatch.setattr(results_page, "versions", lambda: {"torch": "3", "numpy": "1"})
    rows = "| z | TP2 | 6 |\n| new | TP1 | 7 |\n"
    for part, text in (({"y": ""}, "| y | TP1 | 5 |\n"), ({"y": "", "z, too": "2 of 2 cells"}, rows)):
        results_page.record("run", head + text, folder, hardware="another machine", part=part)
    run = results_page.load(folder)["run"]
    rows = [["x", "TP1", 1, "-"], ["y", "TP1", 2, 5], ["z", "TP1", 3, "-"], ["z", "TP2", 4, 6], ["new", "TP1", "-", 7]]
    assert run["tables"] == [{"title": "kept", "columns": ["a", "engine", "b", "c"], "rows": rows}]
    assert run["hardware"] == "a machine"
    assert [note.partition(": measured on")[0] for note in run["notes"]] == ["A note.", "y", "z, too"]
    assert "another machine" in run["notes"][1] and run["notes"][1].endswith(", with torch 3.")
    assert run["notes"][2].endswith(", with torch 3; 2 of 2 cells.")
