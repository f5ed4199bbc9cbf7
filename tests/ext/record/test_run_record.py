"""The files of a run: config with origins and without secrets, events, spans, samples."""

from __future__ import annotations

import json
import logging
import sys
from argparse import Namespace

import pyarrow.parquet as pq
import pytest
import torch

from slime.ext.record.run_reader import read_samples
from slime.ext.record.run_record import SAME_WARNINGS
from slime.ext.record.sample_record import EVALUATION_SCHEMA, rollout_of, sample_of
from slime.observability.timer import timer
from slime.utils.errors import DataError
from slime.utils.types import Sample
from tests.ext.record import recording


@pytest.fixture
def args(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1", "--wandb-key", "hidden"])
    monkeypatch.setenv("SLIME_PASSWORD", "hidden")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "http://me:hidden@host/x")
    values = {
        "lr": 1.0,
        "wandb_key": "hidden",
        "wandb_host": "https://me:hidden@host",
        "value_origins": {"lr": "flag"},
    }
    yield Namespace(save=str(tmp_path), **values)
    recording.stop()


def sample(index: int, length: int = 4, **more) -> Sample:
    values = {"tokens": [7, *range(length)], "response_length": length, "rollout_log_probs": [-0.5] * length}
    return Sample(index=index, group_index=index // 2, prompt="p", response="r" * length, reward=1.0, **values, **more)


def events(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_config_says_where_values_come_from_and_holds_no_secret(args, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIME_AGENT_EXTRA_ENVS", '{"GITHUB_TOKEN": "hidden"}')
    recording.start(args, "driver", primary=True)
    text = (tmp_path / "config.json").read_text()
    config = json.loads(text)
    assert config["values"]["lr"] == {"value": 1.0, "origin": "flag"}
    assert config["values"]["wandb_host"]["origin"] == "default"
    assert config["versions"]["torch"] and config["hardware"]["cpus"]
    assert "SLIME_PASSWORD" in config["environment"] and "hidden" not in text


def test_a_process_joins_a_record_that_the_driver_began_and_no_other(args, tmp_path):
    assert recording.start(args, "actor 0").writer is None
    recording.event("unheard")
    assert not (tmp_path / "events.jsonl").exists()
    recording.start(args, "driver", primary=True)
    assert recording.start(args, "actor 0").writer is not None


def test_the_driver_alone_ends_with_the_place_of_the_record(args, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for process, primary in (("driver", True), ("actor 0", False)):
        recording.start(args, process, primary=primary)
        recording.stop()
    assert [text for text in caplog.messages if f"`slime report {tmp_path}`" in text] == [caplog.messages[-1]]


def test_spans_of_timers_are_an_array_that_perfetto_reads_and_warnings_are_events(args, tmp_path):
    recording.start(args, "actor 0", primary=True)
    with timer("train"):
        logging.getLogger("slime.somewhere").warning("disk of %s", "https://a:hidden@b/c")
        logging.getLogger("slime.somewhere").error("key %s\n--- end of a log\napi_key='x'", args.wandb_key)
    for _ in range(9):
        logging.getLogger("slime.somewhere").warning("again")
    recording.stop()
    text = (tmp_path / "spans.json").read_text()
    (span,) = json.loads(text.rstrip().rstrip(",") + "]")
    assert (span["name"], span["ph"], span["pid"]) == ("train", "X", "actor 0") and span["dur"] >= 0
    texts = [one["text"] for one in events(tmp_path)]
    assert texts == ["disk of https://(secret)@b/c", "key (secret)"] + ["again"] * SAME_WARNINGS


def test_samples_are_written_with_what_was_dropped_and_what_the_trainer_added(args, tmp_path):
    recording.start(args, "rollout manager", primary=True)
    recording.dropped([sample(9)], "all rewards equal")
    hostile = sample(1, length=2, weight_versions=["3", "4"])
    hostile.response, hostile.prompt = "a\ud800\x00<script>", [{"role": "user", "content": "hi"}]
    recording.rollout(5, [sample(0), hostile], [0.5, -0.5])
    columns = {"trainer_log_probs": torch.arange(6.0).split([2, 4]), "advantages": torch.ones(6).split([2, 4])}
    columns["clipped"] = torch.tensor([0.0, 1, 0, 0, 1, 1]).split([2, 4])
    recording.trained(5, 0, [1, 0], columns)
    recording.stop()
    rows = pq.read_table(tmp_path / "samples/rollout_000005.parquet").to_pylist()
    assert [(row["position"], row["drop_reason"]) for row in rows] == [
        (0, None),
        (1, None),
        (None, "all rewards equal"),
    ]
    assert rows[0]["engine_log_probs"] == [-0.5] * 4 and rows[0]["train_reward"] == 0.5
    assert rows[1]["response"] == "a?\x00<script>" and rows[1]["weight_versions"] == ["3", "4"]
    trained = pq.read_table(tmp_path / "samples/train_000005_r0.parquet").to_pylist()
    assert [(row["position"], len(row["trainer_log_probs"])) for row in trained] == [(1, 2), (0, 4)]
    assert [row["clipped"] for row in trained] == [[False, True], [False, False, True, True]]
    assert [one["samples"] for one in events(tmp_path)] == [3, 2]


def test_a_recorded_sample_comes_back_as_training_reads_it(args, tmp_path):
    given = [
        sample(0, rollout_id=7, remove_sample=True, loss_mask=[1, 0, 1, 1], metadata={"raw_reward": 1 / 3, "n": [1]}),
        sample(1, teacher_log_probs=[-0.25] * 4, train_metadata={"a": 1}, status=Sample.Status.TRUNCATED),
    ]
    given[0].rollout_log_probs = [-1 / 3, -0.5, 0.0, -1e-9]
    given[1].reward = {"score": 0.1, "from numpy": torch.tensor(0.5).numpy()[()]}
    recording.start(args, "rollout manager", primary=True)
    lacking = sample(2, multimodal_train_inputs={"pixels": torch.ones(2)}, metadata={"teacher_top": torch.ones(1)})
    recording.rollout(0, [*given, lacking], None)
    recording.stop()
    *rows, last = pq.read_table(tmp_path / "samples/rollout_000000.parquet").to_pylist()
    for old, row in zip(given, rows, strict=True):
        new = sample_of(row)
        assert torch.equal(torch.tensor(new.rollout_log_probs), torch.tensor(old.rollout_log_probs))
        for name in ("tokens", "loss_mask", "rollout_id", "remove_sample", "teacher_log_probs", "metadata", "status",
                     "train_metadata", "reward", "index", "group_index", "response_length"):  # fmt: skip
            assert getattr(new, name) == getattr(old, name), name
    with pytest.raises(DataError, match=r"sample 2 lacks metadata\['teacher_top'\], multimodal_train_inputs; record"):
        sample_of(last)


def test_no_flipped_byte_in_the_pages_of_recorded_samples_is_read_as_another_sample(args, tmp_path, caplog):
    recording.start(args, "rollout manager", primary=True)
    recording.rollout(0, [sample(index) for index in range(8)], None)
    recording.stop()
    path = tmp_path / "samples/rollout_000000.parquet"
    whole, expected = path.read_bytes(), read_samples(path)
    assert expected.num_rows == 8
    num_refused, footer = 0, len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for position in range(0, footer, 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        table = read_samples(path)
        num_refused += table is None
        assert table is None or table.equals(expected), f"byte {position} of {footer}"
    assert num_refused and f"{path} is left out, because it cannot be read: " in caplog.text


def trace_of(*spans):
    return {
        "events": [
            {"name": name, "type": kind, "span_id": f"{name} {start}", "ts": when, "attrs": {}}
            for name, start, end in spans
            for kind, when in (("span_start", start), ("span_end", end))
        ]
    }


def recorded_spans(folder):
    text = (folder / "spans.json").read_text()
    return [(one["name"], one["ts"] / 1e6, one["dur"] / 1e6) for one in json.loads(text.rstrip().rstrip(",") + "]")]


def test_generation_is_when_requests_run_and_not_between_those_of_a_cut_answer(args, tmp_path):
    samples = [sample(0), sample(1)]
    samples[0].trace = trace_of(("sglang_generate", 1.0, 2.0), ("sglang_generate", 10.0, 12.0))
    samples[1].trace = trace_of(("sglang_generate", 10.5, 16.0))
    recording.start(args, "rollout manager", primary=True)
    recording.rollout(0, samples, None)
    recording.rollout(1, samples, None, is_loaded=True)
    recording.stop()
    assert recorded_spans(tmp_path) == [("generation", 1, 1), ("generation", 10, 2), ("longest answer", 12, 4)]


def test_a_generate_function_that_leaves_no_spans_of_its_requests_generates_until_the_reward(args, tmp_path):
    samples = [sample(0), sample(1)]
    samples[0].trace = trace_of(("generate_and_rm", 1.0, 5.0), ("reward_model", 4.0, 5.0))
    samples[1].trace = trace_of(("generate_and_rm", 1.0, 8.0), ("reward_model", 7.0, 8.0))
    recording.start(args, "rollout manager", primary=True)
    recording.rollout(0, samples, None)
    recording.stop()
    assert recorded_spans(tmp_path) == [("generation", 1, 3), ("longest answer", 4, 3), ("reward", 7, 1)]


def test_fewer_samples_and_the_limit_of_size_are_kept(args, tmp_path):
    recording.start(args, "rollout manager", primary=True, record_samples=1, record_max_gib=1e-9)
    for rollout_id in range(3):
        recording.rollout(rollout_id, [sample(0), sample(1)], None)
    recording.stop()
    (path,) = (tmp_path / "samples").iterdir()
    assert path.name == "rollout_000002.parquet" and pq.read_metadata(path).num_rows == 1
    assert [one["files"] for one in events(tmp_path) if one["event"] == "rotated"] == [
        ["rollout_000000.parquet"], ["rollout_000001.parquet"]
    ]  # fmt: skip


def test_answers_of_evaluations_have_files_of_their_own_that_none_overwrites(args, tmp_path):
    recording.start(args, "rollout manager", primary=True, record_samples=2)
    sets = {
        "sums": {"rewards": [1.0], "samples": [sample(i) for i in range(3)]},
        "odd\ud800/": {"samples": [sample(9)]},
    }
    for rollout_id in (None, 0, 12):
        recording.evaluation(rollout_id, sets | {"untold": {"rewards": [1.0], "samples": None}})
    recording.evaluation(13, {"untold": {"rewards": [1.0]}})
    recording.rollout(0, [sample(0)], None)
    recording.stop()
    paths = sorted((tmp_path / "samples").iterdir(), key=lambda path: (rollout_of(path), path.name))
    assert [path.name for path in paths] == [
        "eval_start.parquet", "eval_000000.parquet", "rollout_000000.parquet", "eval_000012.parquet"
    ]  # fmt: skip
    table = pq.read_table(paths[-1])
    assert table.schema.remove_metadata() == EVALUATION_SCHEMA
    rows = [(row["evaluation"], row["position"], row["index"], row["rollout"]) for row in table.to_pylist()]
    assert rows == [("sums", 0, 0, 12), ("sums", 1, 1, 12), ("odd?/", 0, 9, 12)]
    assert [one["tokens"] for one in events(tmp_path)] == [15, 15, 15, 5]


def test_an_entry_of_a_dict_reward_is_what_statistics_of_the_record_read(args, tmp_path):
    recording.start(args, "rollout manager", primary=True, reward_key="score", eval_reward_key="other")
    answers = [sample(0), sample(1), sample(2)]
    rewards = [{"score": 0.25, "other": 1}, {"score": 0.75, "other": 0}, {"other": 1}]
    for answer, reward in zip(answers, rewards, strict=True):
        answer.reward = reward
    recording.rollout(0, answers)
    recording.evaluation(0, {"sums": {"rewards": [1.0, 0.0, 1.0], "samples": answers}})
    recording.stop()
    rows = pq.read_table(next((tmp_path / "samples").glob("rollout_*.parquet"))).to_pylist()
    assert [row["reward"] for row in rows] == [0.25, 0.75, None]
    assert [json.loads(row["reward_json"]) for row in rows] == rewards
    rows = pq.read_table(next((tmp_path / "samples").glob("eval_*.parquet"))).to_pylist()
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0]
