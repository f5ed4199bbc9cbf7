"""metrics.jsonl: complete lines from many writers, torn lines skipped, the latest value wins; the step line."""

import fcntl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slime.observability import metrics_file
from slime.observability.metrics_file import (
    NewRecords,
    append_record,
    merge_by_step,
    read_records,
)
from slime.observability.step_line import format_step


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


def test_a_file_that_another_process_keeps_locked_is_an_error_and_no_endless_wait(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(metrics_file, "LOCK_S", 0.05)
    path = tmp_path / "m.jsonl"
    with open(path, "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another process has locked .*m.jsonl for more than 0.05 s"):
            append_record(path, {"a": 1})
    append_record(path, {"a": 2})
    assert [record["a"] for record in read_records(path)] == [2]


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
    new = NewRecords(path)
    assert new.read() == []
    append_record(path, {"a": 1})
    assert [record["a"] for record in new.read()] == [1]
    with open(path, "ab") as file:
        file.write(b'{"a": 2')
    assert new.read() == []
    with open(path, "ab") as file:
        file.write(b"}\n")
    assert new.read() == [{"a": 2}]
    assert NewRecords(path).read() == []


# The step line


def test_the_line_shows_what_was_measured_and_nothing_else() -> None:
    metrics = {
        "rollout/raw_reward": 0.6834,
        "train/loss": 0.00123,
        "train/kl_loss": 0.0004,
        "train/grad_norm": 0.412,
        "eval/held_out": 0.951,
        "eval/held_out/response_len/mean": 18.0,
        "eval/held_out-truncated_ratio": 0.0,
        "eval/step": 11,
        "perf/rollout_tok_per_s": 4123.0,
        "perf/train_tok_per_s": 7900.0,
        "perf/packing_efficiency": 0.97,
        "perf/time_wait_for_rollout_s": 1.9,
        "perf/time_train_s": 1.61,
        "perf/time_push_s": 0.2,
        "perf/time_step_s": 3.71,
    }
    line = format_step(11, metrics, num_rollout=40)
    assert line == (
        "step 12/40 | reward 0.683 | loss 0.0012 | grad 0.412 | gen 4.1k tok/s | "
        "3.7 s = rollout 1.9 + train 1.6 + push 0.2\n  eval held_out 0.951"
    )
    few = {name: value for name, value in metrics.items() if not name.startswith(("train", "eval"))}
    assert format_step(11, few) == (
        "step 12 | reward 0.683 | gen 4.1k tok/s | train 7.9k tok/s | packed 97% | "
        "3.7 s = rollout 1.9 + train 1.6 + push 0.2"
    )


def test_no_line_has_more_than_120_characters() -> None:
    many = {f"eval/data_set_{number}": 0.5 for number in range(20)} | {f"eval/{'x' * 200}": 1.0, "train/loss": 0.1}
    step, *evals, cut = format_step(0, many).splitlines()
    assert step == "step 1 | loss 0.1000" and cut.startswith("  eval xxx") and cut.endswith("...")
    assert " | ".join(line.strip() for line in evals) == " | ".join(f"eval data_set_{n} 0.500" for n in range(20))
    assert max(map(len, [*evals, cut])) == len(cut) == 120


def test_the_phases_of_the_slowest_step_are_shown_whole() -> None:
    names = ("wait_for_rollout", "train_critic", "train", "push", "save", "eval")
    metrics = {f"perf/time_{name}_s": 1234.56 for name in names} | {"perf/time_step_s": 99999.9}
    metrics |= {"rollout/raw_reward": -10.5, "train/loss": -0.5, "train/grad_norm": 1.0, "eval/held_out": 0.5}
    step, evaluation = format_step(99998, metrics, num_rollout=99999).splitlines()
    assert step == (
        "step 99999/99999 | 100000 s = rollout 1235 + critic 1235 + train 1235 + push 1235 + save 1235 + eval 1235"
    )
    assert len(step) <= 120 and evaluation == "  eval held_out 0.500"
