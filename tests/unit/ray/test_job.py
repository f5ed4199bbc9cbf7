"""The driver's last lines say what went wrong, and its exit code says what kind of error it was."""

from __future__ import annotations

import signal
from argparse import Namespace
from typing import Any

import pytest

from slime.ray import job
from slime.ray.waiting import Interrupted, Sigterm, react_by, sigterm
from slime.utils.errors import EngineDiedError, HookError, ProcessError
from slime.utils.plugins import PluginCall, call_plugin


def broken() -> None:
    raise ValueError("boom")


def calls_a_broken_plug_in(args: Namespace) -> None:
    call_plugin(PluginCall("--custom-rm-path", "mine.grade"), broken)


def meets_a_hook_error(args: Namespace) -> None:
    raise HookError("no such column")


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "check_contents", lambda args: None)
    monkeypatch.setattr(job, "connect", lambda args: None)
    monkeypatch.setattr(job, "configure_logger", lambda: None)
    monkeypatch.setattr(job.signal, "signal", lambda *args: None)
    monkeypatch.setattr(job.sys, "argv", ["train.py"])
    react_by(Sigterm())


def end_of(train: Any, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    with pytest.raises(SystemExit) as end:
        job.run(train, parse=Namespace)
    return end.value.code, capsys.readouterr().err


def test_an_error_of_a_plug_in_is_followed_by_its_name_and_its_own_frames(capsys):
    code, lines = end_of(calls_a_broken_plug_in, capsys)
    last = lines[lines.index("slime job failed") :]
    assert (
        code == 1 and "slime job failed: ValueError: boom\n--custom-rm-path mine.grade raised ValueError: boom" in last
    )
    assert "in broken" in last and "in call_plugin" not in last


def test_a_plug_in_that_does_not_fit_is_bad_input(capsys):
    code, lines = end_of(meets_a_hook_error, capsys)
    assert code == 2 and "HookError: no such column" in lines


@pytest.mark.parametrize(
    "error", [EngineDiedError("actor rank 0 died"), RuntimeError("Connection closed by peer"), HookError("no column")]
)
def test_what_fails_once_sigterm_has_come_is_told_and_does_not_count_as_a_failure(capsys, error):
    def train(args: Namespace) -> None:
        sigterm()._on_signal(signal.SIGTERM, None)
        raise error

    code, lines = end_of(train, capsys)
    assert code == 130 and f": {error}" in lines and "slime job interrupted" in lines


def test_an_interruption_tells_its_cause(capsys):
    leave = ProcessError("SIGTERM to actor rank 0")
    leave.add_note("earlier within the hour (--max-recoveries 1): actor rank 1 died")

    def train(args: Namespace) -> None:
        raise Interrupted from leave

    code, lines = end_of(train, capsys)
    assert code == 130 and "SIGTERM to actor rank 0" in lines and "--max-recoveries 1" in lines
