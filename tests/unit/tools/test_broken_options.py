"""Options of the command-line tools: a number that means nothing ends the tool with one line and exit code 2."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable

import pytest
import uvicorn

from slime.utils.errors import ConfigError
from slime_plugins.rollout_buffer import buffer
from tools import (
    all_reduce,
    analyze_profile,
    convert_hf_to_fp8,
    convert_hf_to_int4_direct,
    convert_hf_to_torch_dist,
    convert_torch_dist_to_hf_parallel,
    diff,
    doctor,
    fp8_cast_bf16,
    ledger,
    plan,
    profile_rollout,
    replay,
    report,
    trace_timeline_viewer,
    watch,
)

FOLDERS = ["--model-dir", "m", "--save-dir", "s"]


def parse_with(build_parser: Callable[[], argparse.ArgumentParser]) -> Callable[[list[str]], object]:
    return lambda argv: build_parser().parse_args(argv)


TOOLS: dict[str, tuple[Callable[[list[str]], object], list[str], list[str]]] = {
    # tool: (what parses its words, words that it needs, options that take a number above 0)
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


@pytest.mark.parametrize(
    ("main", "words", "says"),
    [
        (
            analyze_profile.main,
            ["--profile-dir", "x", "--rank", "-1"],
            "argument --rank: -1 is not a whole number of 0",
        ),
        (ledger.main, ["x", "--group", "-1"], "argument --group: -1 is not a whole number of 0 or more"),
        (ledger.main, ["x", "--sample", "y"], "argument --sample: 'y' is not a whole number"),
        (
            profile_rollout.main,
            ["--router-url", "a:1", "--action", "stop"],
            "argument --router-url: 'a:1' is no address",
        ),
        (trace_timeline_viewer.main, ["x.pt", "--port", "70000"], "argument --port: 70000 is not a whole number"),
        (doctor.main, ["--port", "70000"], "argument --port: 70000 is not a whole number"),
        (
            replay.main,
            "x --step 1 --sample 0 --micro-batch 0 --pdb".split(),
            "--sample and --pdb and --micro-batch cannot be given together: --sample takes no optimizer step",
        ),
        (
            replay.main,
            "x --step 1 --rollout --save-checkpoint".split(),
            "--rollout and --save-checkpoint cannot be given together",
        ),
        (report.main, ["x", "--samples-mb", "nan"], "argument --samples-mb: nan is not a finite number of 0 or more"),
    ],
)
def test_other_options_are_refused_too(main, words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and says in capsys.readouterr().err


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


def test_the_buffer_service_refuses_its_options(monkeypatch, capsys):
    for option, value in (("--port", "0"), ("--port", "65536"), ("--group-size", "0"), ("--group-size", "-4")):
        monkeypatch.setattr(sys, "argv", ["buffer.py", option, value])
        with pytest.raises(SystemExit) as ended:
            buffer.main()
        assert ended.value.code == 2 and f"argument {option}: {value} is not" in capsys.readouterr().err


def test_a_buffer_of_no_size_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["all_reduce.py", "--mib", "-1"])
    with pytest.raises(SystemExit) as ended:
        all_reduce.main()
    assert ended.value.code == 2 and "argument --mib: -1 is not a whole number of 1" in capsys.readouterr().err


def test_the_buffer_service_names_a_folder_that_is_not_there_and_a_generator_that_is_none(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(uvicorn, "run", lambda *given, **options: pytest.fail("it listens"))
    (tmp_path / "half_generator.py").write_text("TASK_TYPE = 'half'")
    for folder, says in ((tmp_path / "none", "none is no folder"), (tmp_path, "half_generator.py has no run_rollout")):
        monkeypatch.setattr(sys, "argv", ["buffer.py", "--generator-dir", str(folder)])
        with pytest.raises(SystemExit) as ended:
            buffer.main()
        assert ended.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("WORLD_SIZE", "many", "WORLD_SIZE is 'many'; it must be a whole number"),
        ("WORLD_SIZE", "0", "rank 0 of 0 processes"),
        ("RANK", "-1", "RANK is '-1'; it must be a whole number"),
        ("RANK", "4", "rank 4 of 1 processes"),
        ("SLURM_LOCALID", "x", "SLURM_LOCALID is 'x'"),
    ],
)
def test_variables_of_the_launcher_that_are_no_ranks_are_refused(name, value, says, monkeypatch):
    for variable in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        convert_hf_to_torch_dist.rendezvous()
