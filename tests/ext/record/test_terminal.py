"""Command-line tools print other people's runs as text, never as terminal control sequences."""

from __future__ import annotations

import ast
from argparse import Namespace
from pathlib import Path

import pytest

from slime.observability.metrics_file import append_record
from slime.utils.errors import DataError
from tests.contracts.source_tree import REPO
from tests.ext.record import recording
from tools import diff, doctor, ledger
from tools.cli import clean_exit
from tools.terminal import plain

ORDERS = "\x1b[2J\x1b]0;owned\x07 \x9b31m \r\b\x7f \x00 \u202egpj.exe \u200b \u2028 \u2066 \ufeff \udcff \n== fake"
TOOLS = """analyze_profile cli diff doctor installed ledger plan profile_rollout replay replay_plan replay_rollout
    report report_plots report_samples report_texts trace_timeline_viewer watch"""


def test_what_a_terminal_obeys_becomes_an_escape_and_letters_stay():
    assert plain("\x1b[31m\n\u202e\udcff") == r"\x1b[31m\n\u202e\udcff"
    assert plain("plain \u00e9 \u4e2d \U0001f600") == "plain \u00e9 \u4e2d \U0001f600"
    assert plain(ORDERS).isprintable()


@pytest.mark.parametrize("name", TOOLS.split())
def test_a_tool_prints_through_say_alone(name):
    tree = ast.parse((REPO / "tools" / f"{name}.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    direct = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    direct += [call.lineno for call in calls if ast.unparse(call.func) in ("sys.stdout.write", "sys.stderr.write")]
    assert direct == []


def only_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The printed lines; none moves the cursor or begins with a line that the run's text forged."""
    out, err = capsys.readouterr()
    lines = (out + err).split("\n")
    assert all(line.isprintable() and not line.startswith("== fake") for line in lines)
    return lines


def test_settings_of_a_foreign_run_are_shown_and_not_obeyed(tmp_path, capsys):
    for name, value in (("a", "x"), ("b", ORDERS)):
        folder = tmp_path / name
        recording.start(Namespace(save=str(folder), rm_url=value, **{f"{value}": 1}), "driver", primary=True)
        recording.stop()
        append_record(folder / "metrics.jsonl", {f"eval/{value}": 0.5, "rollout/step": 1, "eval/step": 1})
    with pytest.raises(SystemExit):
        diff.main([str(tmp_path / "a"), str(tmp_path / "b")])
    assert any("owned" in line for line in only_lines(capsys))


def test_an_error_and_a_verdict_about_a_foreign_run_are_text(capsys):
    with pytest.raises(SystemExit), clean_exit():
        raise DataError(f"{ORDERS} cannot be read")
    doctor._show("engine's start", doctor.BAD, ORDERS)
    assert sum("owned" in line for line in only_lines(capsys)) == 2


def test_reasons_in_a_foreign_ledger_are_text(capsys):
    balance = Namespace(totals=lambda: {"groups issued": 1}, problems=lambda: [f"damaged, {ORDERS}"])
    assert ledger.print_check(balance) == 1
    with pytest.raises(SystemExit):
        ledger.main([str(Path(f"/none/{ORDERS.replace(chr(0), '')}"))])
    assert sum("owned" in line for line in only_lines(capsys)) == 2
