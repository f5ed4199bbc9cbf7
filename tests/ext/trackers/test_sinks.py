"""What trackio and MLflow hold after a run, read back with their own readers."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from slime.compose import flag_groups
from slime.ext.trackers.flags import check_trackers
from slime.ext.trackers.sinks import MlflowSink, TrackioSink
from slime.observability import telemetry


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


def test_a_tracker_that_is_not_installed_is_refused_with_its_extra(monkeypatch):
    monkeypatch.setattr("slime.ext.trackers.flags.find_spec", lambda name: None)
    said = list(check_trackers(Namespace(use_trackio=True, use_mlflow=False, runs_here=True)))
    assert said == ["--use-trackio needs the package trackio; pip install -e '.[trackio]', or drop the flag."]
    assert any(check_trackers in group.check for group in flag_groups())
