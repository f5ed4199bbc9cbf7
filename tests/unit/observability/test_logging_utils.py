"""The one door for metrics: JSONL always, TensorBoard and offline wandb when asked."""

from argparse import Namespace
from pathlib import Path

import pytest

from slime.observability import logging_utils
from slime.observability.metrics_file import read_records


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
def test_wandb_offline_leaves_a_run_folder(tmp_path: Path) -> None:
    args = arguments(
        tmp_path,
        wandb_mode="offline",
        wandb_dir=str(tmp_path / "w"),
        wandb_project="p",
        wandb_group="g",
        wandb_run_id="r1",
        wandb_random_suffix=False,
    )
    args.use_wandb = True
    logging_utils.init_tracking(args)
    logging_utils.log(args, {"train/loss": 1.5, "train/step": 0}, "train/step")
    logging_utils.finish_tracking(args)
    assert list((tmp_path / "w").rglob("run-r1.wandb"))
