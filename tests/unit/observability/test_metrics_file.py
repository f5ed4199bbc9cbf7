"""metrics.jsonl: whole lines from many writers, torn lines skipped, the latest value of a step wins."""

from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from slime.observability.metrics_file import (
    append_record,
    merge_by_step,
    metrics_path,
    read_new_records,
    read_records,
)


def test_a_record_is_read_back_with_the_time_of_writing(tmp_path: Path) -> None:
    append_record(tmp_path / "m.jsonl", {"train/step": 3, "train/loss": torch.tensor(0.5), "note": None})
    (record,) = read_records(tmp_path / "m.jsonl")
    assert record.pop("time") > 0
    assert record == {"train/step": 3, "train/loss": 0.5, "note": None}


def test_nan_and_infinity_stay_valid_json(tmp_path: Path) -> None:
    append_record(tmp_path / "m.jsonl", {"a": float("nan"), "b": [float("inf")]})
    (record,) = read_records(tmp_path / "m.jsonl")
    assert (record["a"], record["b"]) == ("nan", ["inf"])


def test_a_line_torn_by_a_kill_is_skipped_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    append_record(path, {"a": 1})
    with open(path, "ab") as file:
        file.write(b'{"a": 2, "b')
    append_record(path, {"a": 3})
    assert [record["a"] for record in read_records(path)] == [1, 3]


def test_lines_of_many_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: append_record(path, {"number": number, "text": "x" * 9000}), range(64)))
    assert sorted(record["number"] for record in read_records(path)) == list(range(64))


def test_the_latest_value_of_a_step_wins_as_after_a_resume(tmp_path: Path) -> None:
    records = [
        {"train/step": 0, "loss": 1.0},
        {"train/step": 1, "loss": 0.9, "norm": 2.0},
        {"rollout/step": 1, "reward": 0.1},
        {"train/step": 1, "loss": 0.8},
    ]
    assert merge_by_step(records, "train/step") == {
        0: {"train/step": 0, "loss": 1.0},
        1: {"train/step": 1, "loss": 0.8, "norm": 2.0},
    }


def test_following_a_file_gives_whole_new_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert read_new_records(path, 0) == ([], 0)
    append_record(path, {"a": 1})
    first, offset = read_new_records(path, 0)
    with open(path, "ab") as file:
        file.write(b'{"a": 2')
    half, same = read_new_records(path, offset)
    with open(path, "ab") as file:
        file.write(b"}\n")
    second, _ = read_new_records(path, same)
    assert [record["a"] for record in first] == [1]
    assert (half, same) == ([], offset)
    assert second == [{"a": 2}]


def test_the_file_lies_in_the_save_folder_or_in_a_folder_named_by_the_run() -> None:
    assert metrics_path(Namespace(save="/x/y", wandb_run_id="r")) == Path("/x/y/metrics.jsonl")
    assert metrics_path(Namespace(save=None, wandb_run_id="r")) == Path("runs/r/metrics.jsonl").absolute()
    assert metrics_path(Namespace(save=None, wandb_run_id=None)) is None
