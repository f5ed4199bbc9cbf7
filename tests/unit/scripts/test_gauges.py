"""The gauges of the house count what they say, and golden numbers differ by a bit."""

from __future__ import annotations

from pathlib import Path

from scripts import gauges
from tests.golden.__main__ import differences


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_closure_follows_top_level_imports_and_lazy_ones_where_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(gauges, "REPO", tmp_path)
    start = write(
        tmp_path / "train.py",
        "from typing import TYPE_CHECKING\nimport slime.a.b\nif TYPE_CHECKING:\n    import slime.typed\n"
        "def f():\n    from slime import lazy\n",
    )
    for name in ("slime/__init__", "slime/a/__init__", "slime/a/b", "slime/typed", "slime/lazy", "slime/alone"):
        write(tmp_path / f"{name}.py", "")
    names = [
        {str(path.relative_to(tmp_path)) for path in gauges.closure(start, with_lazy=with_lazy)}
        for with_lazy in (False, True)
    ]
    assert names[0] == {"train.py", "slime/__init__.py", "slime/a/__init__.py", "slime/a/b.py"}
    assert names[1] - names[0] == {"slime/lazy.py"}


def test_a_recording_gives_the_files_of_the_second_call_and_the_lines_of_all_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(gauges, "REPO", tmp_path)
    write(tmp_path / "slime/a.py", "x = 1\n")
    write(
        tmp_path / "log/1",
        "D -u /repo/train.py --colocate\nM slime.a\nB TrainJob.train 5\nE TrainJob.train 6\nB TrainJob.train 10\n"
        "E TrainJob.train 12\nL slime/a.py 3\n",
    )
    write(tmp_path / "log/2", "D -c spawn\nF slime/a.py 11\nF slime/b.py 13\nL slime/a.py 4\nF slime/torn")
    recorded = gauges.Recorded()
    recorded.read(tmp_path / "log")
    assert recorded.driver == recorded.modules == {tmp_path / "slime/a.py"}
    assert recorded.files_in("TrainJob.train") == ["slime/a.py"]
    assert recorded.lines["slime/a.py"] == {3, 4}


def test_golden_numbers_differ_by_a_bit_a_step_and_a_name():
    recorded = {"steps": [{"loss": 0.1}], "rollouts": [{"tokens": "ab"}]}
    assert differences(recorded, recorded) == []
    assert len(differences(recorded, {"steps": [{"loss": 0.1 + 2**-56}], "rollouts": [{"tokens": "ab"}]})) == 1
    assert len(differences(recorded, {"steps": [], "rollouts": [{"token": "ab"}]})) == 3
