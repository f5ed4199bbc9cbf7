"""All metrics go through one function, and always to JSONL."""

import logging
from argparse import Namespace
from pathlib import Path

import pytest

from slime.observability import logging_utils, text_log
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
    assert logging_utils.init_tracking(arguments(tmp_path, wandb_run_id="mine")) == facts, "open already"
    logging_utils.finish_tracking()
    assert logging_utils.init_tracking(arguments(tmp_path, wandb_run_id="mine")) == {}
    logging_utils.finish_tracking()
    assert logging_utils.init_tracking(arguments(tmp_path), primary=False) == {}
    logging_utils.finish_tracking()


@pytest.mark.parametrize(("verbose", "level"), [(False, logging.INFO), (True, logging.DEBUG)])
def test_verbose_is_about_slime_and_not_about_its_libraries(
    verbose: bool, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, int] = {}
    monkeypatch.setattr(text_log._Process, "is_logging_configured", False)
    monkeypatch.setattr(logging, "basicConfig", lambda **options: given.update(root=options["level"]))
    monkeypatch.setattr(logging.getLogger("slime"), "setLevel", lambda level: given.update(slime=level))
    logging_utils.configure_logger("actor 0", text_log.level_of(Namespace(verbose=verbose)))
    assert given == {"root": logging.INFO, "slime": level}
