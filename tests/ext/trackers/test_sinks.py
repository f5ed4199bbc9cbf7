"""What each tracker holds after a run, read with its own reader."""

from __future__ import annotations

import json
import struct
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.compose import flag_groups
from slime.ext.trackers.flags import check_trackers, derive_wandb_key
from slime.ext.trackers.sinks import TABLE_COLUMNS, MlflowSink, TrackioSink, WandbSink
from slime.observability import logging_utils, telemetry
from slime.utils.tensorboard_utils import _TensorboardAdapter
from slime.utils.types import Sample


def arguments(folder: Path) -> Namespace:
    return Namespace(
        save=str(folder),
        wandb_run_id="r1",
        wandb_key="secret-of-mine",
        lr=1e-6,
        use_wandb=False,
        use_tensorboard=False,
        trackio_project="p",
        mlflow_experiment="p",
        mlflow_uri=f"sqlite:///{folder}/mlflow.db",
    )


def log_as_a_job(args: Namespace, sink: type[telemetry.Sink]) -> None:
    """Log from the driver, then from a process that joins its run."""
    telemetry.start(args, "driver", (sink,), primary=True)
    telemetry.log({"perf/time_step_s": 2.0, "note": "text", "rollout/step": 3}, "rollout/step")
    joined = sink(args, "rollout manager", primary=False)  # type: ignore[call-arg]
    joined.log({"rollout/pass@1": 0.5, "rollout/step": 3}, "rollout/step")
    joined.close()
    telemetry.stop()


def test_mlflow_has_one_run_with_metrics_and_config_without_secrets(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    args = arguments(tmp_path)
    log_as_a_job(args, MlflowSink)
    client = mlflow.MlflowClient(args.mlflow_uri)
    [run] = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert run.data.metrics == {"perf/time_step_s": 2.0, "rollout/pass_1": 0.5, "rollout/step": 3.0}
    assert [one.step for one in client.get_metric_history(run.info.run_id, "rollout/pass_1")] == [3]
    assert run.info.status == "FINISHED"
    assert run.data.params["lr"] == "1e-06"
    assert "secret-of-mine" not in str(run.data.params)


def test_trackio_has_one_run_with_metrics_and_config_without_secrets(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="the extra `trackio` is not installed")
    log_as_a_job(arguments(tmp_path), TrackioSink)
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("p") == ["r1"]
    logged = {name: (value, row["step"]) for row in SQLiteStorage.get_logs("p", "r1") for name, value in row.items()}
    assert logged["perf/time_step_s"] == (2.0, 3) and logged["rollout/pass@1"] == (0.5, 3)
    config = SQLiteStorage.get_run_config("p", "r1")
    assert config["lr"] == 1e-6 and "secret-of-mine" not in str(config)
    assert capsys.readouterr().out == ""


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_gets_every_number_but_the_step_by_the_names_of_plug_ins(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    args = arguments(tmp_path)
    args.use_tensorboard = True
    logging_utils.init_tracking(args)
    logging_utils.log(args, {"train/loss": 1.5, "train/name": "text", "train/step": 7}, "train/step")
    logging_utils.finish_tracking(args)
    assert scalars_of(tmp_path / "tb") == {"train/loss": [(7, 1.5)]}


def test_a_plug_in_writes_to_tensorboard_with_its_own_step(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "own"))
    adapter = _TensorboardAdapter(Namespace())
    adapter.log(data={"buffer/size": 3}, step=2)
    adapter.close()
    assert scalars_of(tmp_path / "own") == {"buffer/size": [(2, 3.0)]}


def test_tensorboard_dir_is_the_folder_unless_the_variable_names_another(tmp_path, monkeypatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    for folder in ("flag", "variable"):
        adapter = _TensorboardAdapter(Namespace(tensorboard_dir=str(tmp_path / "flag")))
        adapter.log(data={"buffer/size": 3}, step=2)
        adapter.close()
        assert scalars_of(tmp_path / folder) == {"buffer/size": [(2, 3.0)]}
        monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "variable"))


@pytest.mark.slow
def test_wandb_offline_has_metrics_config_and_the_samples_as_a_table(tmp_path):
    import wandb

    args = arguments(tmp_path)
    vars(args).update(wandb_mode="offline", wandb_dir=str(tmp_path / "w"), wandb_project="p", wandb_group="g")
    telemetry.start(args, "driver", (WandbSink,), primary=True)
    sample = Sample(group_index=2, index=9, prompt="1 + 1?", response="2", label="2", reward=1.0, response_length=1)
    telemetry.samples("rollout", samples=[sample], rollout_id=4)
    telemetry.log({"rollout/raw_reward": 0.5, "rollout/step": 4}, "rollout/step")
    telemetry.stop()
    wandb.teardown()
    [file] = (tmp_path / "w").rglob("run-r1.wandb")
    records = wandb_records(file)
    updates = [item for record in records for item in (*record.run.config.update, *record.config.update)]
    config = {item.key: item.value_json for item in updates}  # from the run's start, and from a moment later
    logged = {item.nested_key[0]: item.value_json for record in records for item in record.history.item}
    assert float(config["lr"]) == 1e-6 and "secret-of-mine" not in str(config)
    assert logged["rollout/raw_reward"] == "0.5" and logged["rollout/step"] == "4"
    [table] = file.parent.rglob("*.table.json")
    row = dict(zip(TABLE_COLUMNS, json.loads(table.read_text())["data"][0], strict=True))
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
        if kind in (1, 4):  # complete, or the last part
            records.append(Record.FromString(part))
            part = b""
    return records


def test_plug_ins_of_the_rollout_manager_find_a_run_of_wandb(tmp_path, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(WandbSink, "_open", lambda sink: opened.append(sink._name))
    args = Namespace(save=str(tmp_path), wandb_mode="offline", wandb_run_id="r1")
    for process in ("actor 0", "rollout manager"):
        WandbSink(args, process)
    assert opened == ["r1"]


def test_wandb_that_is_disabled_is_not_opened(tmp_path):
    sink = WandbSink(Namespace(save=str(tmp_path), wandb_mode="disabled"), "driver", primary=True)
    sink.log({"train/loss": 1.0, "train/step": 0}, "train/step")
    sink.close()
    assert list(tmp_path.iterdir()) == []


def wanted(**more: object) -> Namespace:
    flags = dict.fromkeys(("use_wandb", "use_tensorboard", "use_trackio", "use_mlflow"), False)
    keys = dict.fromkeys(("wandb_mode", "wandb_key", "wandb_key_file", "wandb_host"))
    return Namespace(**{**flags, **keys, "runs_here": True, **more})


def test_a_tracker_that_is_not_installed_is_refused_with_its_extra(monkeypatch):
    monkeypatch.setattr("slime.ext.trackers.flags.find_spec", lambda name: None)
    said = list(check_trackers(wanted(use_trackio=True)))
    assert said == ["--use-trackio needs the package trackio; pip install -e '.[trackio]', or drop the flag."]
    assert any(check_trackers in group.check for group in flag_groups())


def test_wandb_wants_a_key_a_login_or_no_network(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.chdir(tmp_path)
    elsewhere = wanted(use_wandb=True, wandb_host="https://wandb.example.org")
    [said] = check_trackers(wanted(use_wandb=True))
    assert "WANDB_API_KEY" in said
    assert not list(check_trackers(wanted(use_wandb=True, wandb_mode="offline")))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert not list(check_trackers(wanted(use_wandb=True)))
    assert list(check_trackers(elsewhere)) == [said]
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/settings").write_text("[default]\nmode = offline\n")
    assert not list(check_trackers(elsewhere))


def test_a_key_of_wandb_on_the_command_line_is_advised_against(caplog, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    args = wanted(driver_variables=[])
    derive_wandb_key(args)
    assert args.wandb_key is None and caplog.text == "" and args.driver_variables == []
    args.wandb_key = "k3y"
    derive_wandb_key(args)
    assert "--wandb-key-file" in caplog.text and "k3y" not in caplog.text
    assert args.driver_variables == ["WANDB_API_KEY"]  # which leaves the job's environment
