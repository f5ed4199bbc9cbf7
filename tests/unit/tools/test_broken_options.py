"""Options of the command-line tools: an invalid number ends the tool with one line and exit code 2."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable

import pytest

from tools import (
    analyze_profile,
    convert_hf_to_fp8,
    convert_hf_to_int4_direct,
    convert_torch_dist_to_hf_parallel,
    diff,
    fp8_cast_bf16,
    plan,
    profile_rollout,
    report,
    trace_timeline_viewer,
    watch,
)

FOLDERS = ["--model-dir", "m", "--save-dir", "s"]


def parse_with(build_parser: Callable[[], argparse.ArgumentParser]) -> Callable[[list[str]], object]:
    return lambda argv: build_parser().parse_args(argv)


TOOLS: dict[str, tuple[Callable[[list[str]], object], list[str], list[str]]] = {
    # tool: (its parser, required words, options that take a number above 0)
    "analyze_profile": (analyze_profile.main, ["--profile-dir", "x"], ["--top-n"]),
    "convert_hf_to_fp8": (parse_with(convert_hf_to_fp8.build_parser), FOLDERS, ["--max-workers"]),
    "convert_hf_to_int4_direct": (
        parse_with(convert_hf_to_int4_direct.build_parser), FOLDERS, ["--group-size", "--max-workers"],
    ),
    "fp8_cast_bf16": (
        parse_with(fp8_cast_bf16.build_parser),
        ["--input-fp8-hf-path", "m", "--output-bf16-hf-path", "s"],
        ["--max-workers"],
    ),
    "convert_torch_dist_to_hf_parallel": (
        convert_torch_dist_to_hf_parallel.parse,
        ["--input-dir", "m", "--output-dir", "s"],
        ["--load-max-workers", "--save-max-workers"],
    ),
    "plan": (parse_with(plan.build_parser), [], ["--mfu", "--gpu-memory", "--host-memory"]),
    "profile_rollout": (
        profile_rollout.main, ["--router-url", "http://a:1", "--action", "start"], ["--num-steps"],
    ),
    "trace_timeline_viewer": (trace_timeline_viewer.main, ["x.pt"], ["--port"]),
}  # fmt: skip
CASES = [(tool, option) for tool, (_, _, options) in TOOLS.items() for option in options]


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "many", "", "9" * 400])
@pytest.mark.parametrize(("tool", "option"), CASES)
def test_a_number_that_means_nothing_is_refused(tool, option, value, capsys):
    parse, needed, _ = TOOLS[tool]
    with pytest.raises(SystemExit) as ended:
        parse([*needed, f"{option}={value}"])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: " in last and "is not a" in last


@pytest.fixture
def run(tmp_path):
    """A run without a step, and a dump with its pages."""
    (tmp_path / "metrics.jsonl").touch()
    for name in ("0.pt", "0.trace.json", "0.timeline.html"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("main", "words", "says"),
    [
        (diff.main, "RUN RUN --html RUN/no/page.html", "page.html cannot be written (No such file or directory)"),
        (report.main, "RUN --output RUN/no/page.html", "name another file with --output"),
        (
            watch.main,
            "RUN --port TAKEN",
            "--host 127.0.0.1 --port TAKEN cannot be listened on: Address already in use",
        ),
        (watch.main, "RUN --host 192.0.2.1", "--host 192.0.2.1 --port 8123 cannot be listened on"),
        (trace_timeline_viewer.main, "RUN/0.pt --port TAKEN", "--port TAKEN cannot be listened on: Address already"),
    ],
)
def test_a_file_or_an_address_that_cannot_be_had_is_a_message(run, main, words, says, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        given = {"RUN": str(run), "TAKEN": str(other.getsockname()[1])}
        for name, value in given.items():
            words, says = words.replace(name, value), says.replace(name, value)
        with pytest.raises(SystemExit) as ended:
            main(words.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ") and says in said
