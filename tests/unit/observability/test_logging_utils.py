"""The one door for metrics: JSONL always, TensorBoard and offline wandb when asked."""

import json
import struct
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import wandb

from slime.observability import logging_utils, telemetry
from slime.observability.metrics_file import read_records
from slime.observability.sample_table import COLUMNS, SampleTable
from slime.utils.types import Sample


def arguments(folder: Path, **more: object) -> Namespace:
    return Namespace(save=str(folder), use_wandb=False, use_tensorboard=False, **more)


def test_metrics_land_in_the_save_folder(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    logging_utils.init_tracking(args)
    logging_utils.log(args, {"train/loss": 1.5, "train/step": 0}, "train/step")
    logging_utils.finish_tracking(args)
    start, record = read_records(tmp_path / "metrics.jsonl")
    assert len(start["run/start"]) > 8
    assert record["train/loss"] == 1.5


def test_the_primary_makes_the_run_id_that_no_flag_gave(tmp_path: Path) -> None:
    facts = logging_utils.init_tracking(arguments(tmp_path))
    assert list(facts) == ["wandb_run_id"]
    assert logging_utils.init_tracking(arguments(tmp_path, wandb_run_id="mine")) == {}
    assert logging_utils.init_tracking(arguments(tmp_path), primary=False) == {}
    logging_utils.finish_tracking()


def test_tensorboard_gets_every_number_but_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    args = arguments(tmp_path)
    args.use_tensorboard = True
    logging_utils.init_tracking(args)
    logging_utils.log(args, {"train/loss": 1.5, "train/name": "text", "train/step": 7}, "train/step")
    logging_utils.finish_tracking(args)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    (event,) = events.Scalars("train/loss")
    assert (event.step, event.value) == (7, 1.5)


@pytest.mark.slow
def test_wandb_offline_has_metrics_config_and_the_samples_as_a_table(tmp_path: Path) -> None:
    args = arguments(
        tmp_path,
        wandb_mode="offline",
        wandb_dir=str(tmp_path / "w"),
        wandb_project="p",
        wandb_group="g",
        wandb_run_id="r1",
        wandb_key="secret-of-mine",
        wandb_random_suffix=False,
        lr=0.25,
    )
    args.use_wandb = True
    telemetry.start(args, "driver", (SampleTable,), primary=True)
    sample = Sample(group_index=2, index=9, prompt="1 + 1?", response="2", label="2", reward=1.0, response_length=1)
    telemetry.samples("rollout", samples=[sample], rollout_id=4)
    telemetry.log({"rollout/raw_reward": 0.5, "rollout/step": 4}, "rollout/step")
    telemetry.stop()
    wandb.teardown()
    [file] = (tmp_path / "w").rglob("run-r1.wandb")
    records = wandb_records(file)
    updates = [item for record in records for item in (*record.run.config.update, *record.config.update)]
    config = {item.key: item.value_json for item in updates}  # of the run's start, and of what came a moment later
    logged = {item.nested_key[0]: item.value_json for record in records for item in record.history.item}
    assert config["lr"] == "0.25" and "secret-of-mine" not in str(config)
    assert logged["rollout/raw_reward"] == "0.5" and logged["rollout/step"] == "4"
    [table] = file.parent.rglob("*.table.json")
    row = dict(zip(COLUMNS, json.loads(table.read_text())["data"][0], strict=True))
    assert (row["group"], row["prompt"], row["response"], row["reward"]) == (2, "1 + 1?", "2", "1.0")


def wandb_records(file: Path) -> list[Any]:
    """Return the records of an offline run: in blocks of 32 KiB, each part after its checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part, records = file.read_bytes(), 7, b"", []
    while len(data) - at > 7:
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(part))
            part = b""
    return records
