"""Every benchmark starts: its command line is read, and the flags that it hands to train.py are accepted.

Checks are added to ``slime.flags.parse`` all the time, and nothing else runs the benchmarks; without these tests a new
check ends one of them and nobody notices.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from argparse import Namespace

import pytest

from slime.flags.parse import parse_args
from slime.weights.push.engine import EngineProxy
from tests.contracts.source_tree import REPO

FOLDER = REPO / "benchmarks"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text())
PARTS = {
    "demo_step",
    "model_shapes",
    "phase_table",
    "published_configs",
    "results_page",
    "step_numbers",
    "tower_in_step",
}
"""Modules that programs import."""
OF_TRAINING = {"first_push", "plan_memory", "record_overhead", "rollout_client", "step_phases", "train_mfu"}
OF_TRAINING |= {"weight_push_engine", "weight_push_ways"}
"""Programs with flags of train.py: each has a test below."""


@pytest.fixture(autouse=True)
def path_as_before(monkeypatch):
    """Benchmarks put the repository on the path."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def load(name: str):
    return importlib.import_module(f"benchmarks.{name}")


def test_every_file_is_a_program_or_a_part_of_one():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*PROGRAMS, *PARTS}


def test_no_program_with_flags_of_training_is_missing_here():
    sources = {name: (FOLDER / f"{name}.py").read_text() for name in PROGRAMS}
    calls = ("parse_args(argv=", "start_trainer(", "demo_args(")
    assert {name for name, source in sources.items() if any(call in source for call in calls)} == OF_TRAINING


def test_the_page_names_every_program():
    page = (FOLDER / "README.md").read_text()
    assert [name for name in PROGRAMS if not re.search(rf"benchmarks[/.]{name}\b", page)] == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_command_line_is_explained(name, monkeypatch, capsys):
    module = load(name)
    monkeypatch.setattr(sys, "argv", [str(FOLDER / f"{name}.py"), "--help"])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}.py")


@pytest.mark.parametrize(
    ("model", "num_gpus", "extra"),
    [
        ("qwen3-1.7B", 1, ""),
        ("qwen3-4B", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        ("glm4-9B", 1, ""),
        ("qwen3-30B-A3B", 4, "--expert-model-parallel-size 4"),
        ("moonlight", 1, ""),
        ("qwen3-4B", 1, "--lora-rank 32"),
        ("qwen3-vl-8B", 1, "--train-vision-tower"),
    ],
)
def test_the_flags_of_the_trainers_benchmarks_are_accepted(model, num_gpus, extra, tmp_path):
    options = Namespace(model=model, tokens=1024, layers=4)
    args = load("train_mfu").trainer_args(options, extra.split(), num_gpus, str(tmp_path))
    assert (args.actor_num_gpus_per_node, args.num_layers) == (num_gpus, 4)


def test_the_flags_of_the_steps_with_and_without_the_record_are_accepted(tmp_path):
    module, options = load("record_overhead"), Namespace(model="small", layers=2, samples=4, tokens=8)
    module.write_model(tmp_path, options)
    assert module.trainer_args(options, str(tmp_path)).num_layers == 2


@pytest.mark.parametrize(
    "case", ["0.6B", "0.6B-offload", "4B-block", "30B-A3B-3-layers", "moonlight-4-layers", "4B-cp2"]
)
def test_the_flags_of_the_memory_benchmark_are_accepted(case, tmp_path):
    module = load("plan_memory")
    module.write_folder(tmp_path)
    assert parse_args(argv=module.trainer_words(module.CASES[case], str(tmp_path))).debug_train_only


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("--model tiny", ""),
        ("--model tiny-moe --num-gpus 2", "--expert-model-parallel-size 2 --sglang-ep-size 2"),
        ("--model tiny --num-gpus 2 --engine-gpus 1 --disaggregated", "--tensor-model-parallel-size 2"),
        ("--model qwen3-4B", ""),
        ("--model glm4-9B", ""),
        ("--model qwen3-30B-A3B --fp8 --num-gpus 4", "--expert-model-parallel-size 4 --sglang-ep-size 4"),
    ],
)
def test_the_flags_of_the_push_into_engines_are_accepted(command, extra, monkeypatch, tmp_path):
    module = load("weight_push_engine")
    monkeypatch.setattr(sys, "argv", ["weight_push_engine.py", *command.split(), "--", *extra.split()])
    options, behind = module.parse_options()
    module.write_folder(tmp_path, options)
    args = module.run_args(str(tmp_path), options, behind)
    assert args.colocate != options.disaggregated
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == args.num_layers


def test_the_flags_of_the_benchmark_of_asynchrony_are_accepted(tmp_path):
    module = load("asynchrony")
    module.write_model(tmp_path / "task", "tiny")
    options = Namespace(out=tmp_path, prompts=4, rollouts=3, cap=64, tokens=512)
    for mode in module.MODES:
        words = module.command(mode, options, ["--fp32"])
        args = parse_args(argv=words[2:])
        assert args.colocate == (mode == "colocated")
        assert args.max_staleness == (int(mode[-1]) if mode.startswith("staleness") else None)
    trace = {"median": 800, "sigma": 1.0, "cap": 16384}
    lengths = sorted(module.response_length(index, trace) for index in range(4001))
    assert lengths[2000] == pytest.approx(800, rel=0.1) and lengths[-1] == 16384


def test_modes_that_ran_by_themselves_are_compared_in_one_table(monkeypatch, tmp_path, capsys):
    module, files = load("asynchrony"), []
    options = {"model": "tiny", "prompts": 4, "median": 12, "sigma": 1, "cap": 64, "tokens": 512, "rollouts": 5}
    for mode, seconds in {"synchronous": 8.0, "staleness 2": 4.0}.items():
        numbers = {"mode": mode, "rollouts": 2, "seconds": seconds, "tokens": 800, "tokens_per_s": 800 / seconds}
        row = {**numbers, "idle": [0.5, 0.25], "trainer_waits": None, "use": []}
        files.append(tmp_path / f"{mode}.json")
        files[-1].write_text(json.dumps({"command": f"python {mode}", "options": options, "rows": [row]}))
    words = ["asynchrony.py", "--out", str(tmp_path / "both"), "--merge", *map(str, files)]
    monkeypatch.setattr(sys, "argv", words)
    module.main()
    assert "| staleness 2 | 2 | 4.0 | 200 | 2.00 | 50%, 25% |" in capsys.readouterr().out
    written = json.loads((tmp_path / "both/asynchrony.json").read_text())
    assert written["command"] == "python synchronous\npython staleness 2"
    assert [row[4] for row in written["tables"][0]["rows"]] == [1.0, 2.0]


def test_a_model_without_weights_is_the_config_that_an_engine_reads(tmp_path):
    module = load("asynchrony")
    module.write_model(tmp_path, "qwen3-4B", has_weights=False)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"]) == (["Qwen3ForCausalLM"], 36)


def test_the_flags_of_the_real_engine_of_the_clients_benchmark_are_accepted(tmp_path):
    options = Namespace(model="tiny", samples=16, cap=64)
    args = load("rollout_client").engine_args(tmp_path, options, ["--fp32"])
    assert (args.rollout_batch_size, args.sglang_load_format, args.job_secret) == (2, "dummy", None)


def test_clients_of_a_real_engine_ask_for_the_lengths_of_the_trace_after_short_first_ones():
    trace = {"median": 12, "sigma": 1.0, "cap": 64}
    work = load("rollout_client").Work("http://any", 8, 64, trace)
    lengths = [load("asynchrony").response_length(number, trace) for number in range(32, 40)]
    assert [work.params(number)["max_new_tokens"] for number in range(30, 40)] == [16, 16, *lengths]


@pytest.mark.parametrize("command", ["--model tiny", "--model qwen3-4B", "--model qwen3-30B-A3B --layers 2"])
def test_the_flags_of_the_ways_of_a_push_are_accepted(command, monkeypatch, tmp_path):
    module = load("weight_push_ways")
    monkeypatch.setattr(sys, "argv", ["weight_push_ways.py", *command.split()])
    options, behind = module.parse_options()
    module.write_folder(tmp_path, options)
    args = module.trainer_args(str(tmp_path), options, behind)
    assert args.num_layers == json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]


def test_the_flags_of_the_benchmark_of_first_pushes_are_accepted(tmp_path):
    module, options = load("first_push"), Namespace(layers=3, experts=8)
    module.write_folder(tmp_path, options)
    args = module.trainer_args(str(tmp_path), options)
    assert (args.num_layers, args.num_experts, args.hidden_size) == (3, 8, module.WIDTH)


def test_the_flags_of_the_demos_step_are_accepted(tmp_path, monkeypatch):
    from benchmarks.demo_step import demo_args
    from examples.tiny_arithmetic.make_task import make_task

    monkeypatch.setenv("TENSORBOARD_DIR", "")
    make_task(tmp_path / "task", seed=1)
    args = demo_args(tmp_path, 2, 2, ["--sglang-sleep-on-idle"])
    assert args.rollout_batch_size == 2


def test_the_demos_engine_has_all_that_a_push_asks_of_one():
    from benchmarks.demo_step import InProcessEngine

    engine = InProcessEngine(Namespace(), Namespace(), Namespace())
    assert [name for name in EngineProxy.__annotations__ if not hasattr(engine, name)] == []


def test_the_rows_of_a_push_are_verbs_of_an_engine():
    from benchmarks.step_phases import ROWS, VERBS

    timed = {row.measured for row in ROWS if row.measured.endswith(("_update", "_buckets"))}
    assert timed == set(VERBS)
