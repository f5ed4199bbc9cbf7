"""The run scripts of examples/, with a recorder instead of ``ray``: all that they submit exists and is consistent."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from examples.eval_multi_task.make_data import make_data
from examples.tiny_arithmetic.make_task import make_task
from examples.tiny_tools.make_task import make_agents
from examples.tiny_tools.make_task import make_task as make_tools
from examples.vision_shapes import make_task as vision_shapes
from slime.compose import parse_args, parse_flags
from slime.flags.cluster import check_loop
from slime.flags.evaluation import EvalDatasetConfig
from slime.rollout.rm_hub import async_rm
from slime.utils.types import Sample
from tests.contracts.source_tree import REPO

SCRIPTS = sorted(path.relative_to(REPO) for path in REPO.glob("examples/**/run-*.sh"))
PAGE_OF_EXAMPLES = Path("docs/environments.md")
"""Scripts without a folder."""
EXTRAS = {"run-tiny-gym.sh": ("reasoning_gym", "gym"), "run-tiny-verifiers.sh": ("verifiers", "verifiers")}
"""Script -> the package whose rows it reads, and the extra that installs that package."""


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory):
    """Files that the demo and the warm start leave, as far as the scripts check them."""
    folder = tmp_path_factory.mktemp("tiny")
    make_task(folder / "task", seed=7)
    make_tools(folder / "tools", seed=7)
    make_agents(folder / "agents", seed=7)
    vision_shapes.make_task(folder / "shapes/task", 2026, {"eval": 2, "grpo": 64, "sft": 2})
    # Any model folder works in place of a trained one.
    for copy in ("sft", "tools/sft", "agents/sft", "gym/sft", "grpo-seed1", "grpo-seed1/hf/9"):
        shutil.copytree(folder / "task/hf", folder / copy, dirs_exist_ok=True)
    shutil.copytree(folder / "shapes/task/hf", folder / "shapes/sft")
    for task in ("tools", "agents", "gym", "shapes"):
        (folder / task / "sft/done").touch()
    return folder


@pytest.fixture
def tiny(left_behind, tmp_path):
    """A folder with these files, for one test."""
    shutil.copytree(left_behind, tmp_path, copy_function=os.link, dirs_exist_ok=True)
    return tmp_path


def submitted(script: Path, tiny: Path, **variables: str) -> tuple[list[str], dict[str, str]]:
    """The job's arguments and environment."""
    record = tiny / "record"
    environment = dict(os.environ) | {
        "SLIME_SCRIPT_EXTERNAL_RAY": "1",
        "TINY_DIR": str(tiny),
        "TEACHER_URL": "http://127.0.0.1:1/generate",
        **variables,
    }
    command = f'ray() {{ printf "%s\\n" "$@" >"{record}"; }}; export -f ray; exec {REPO / script} --seed 5'
    subprocess.run(["bash", "-c", command], env=environment, check=True, timeout=120)
    lines = record.read_text().splitlines()
    return lines[lines.index("--") + 1 :], json.loads(lines[lines.index("--runtime-env-json") + 1])["env_vars"]


def test_every_example_that_can_be_run_has_a_page_that_names_its_scripts():
    for script in SCRIPTS:
        page = PAGE_OF_EXAMPLES if script.parent.name == "examples" else script.parent / "README.md"
        assert str(script) in (REPO / page).read_text()


TINY = [
    *((Path(f"scripts/run-tiny-{name}.sh"), "") for name in ("cpu", "cpu-sft", "gpu")),
    *((Path("scripts/run-tiny-cpu.sh"), loop) for loop in ("async", "ahead", "apart")),
    *((script, "") for script in SCRIPTS),
]


@pytest.mark.parametrize(("script", "loop"), TINY, ids=lambda value: str(value) or "sync")
def test_what_a_script_submits_exists_and_passes_every_check(script, loop, tiny, monkeypatch):
    job, environment = submitted(script, tiny, **({"LOOP": loop} if loop else {}))
    assert (REPO / job[1]).is_file()
    for folder in environment["PYTHONPATH"].split(":"):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(REPO)
    args = parse_flags(job[2:])
    assert args.seed == 5 and args.num_rollout > 0
    for name, value in vars(args).items():
        if value and name.startswith("custom_") and name.endswith("_path") and name != "custom_config_path":
            module, _, attribute = value.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), value
    if args.custom_config_path:
        assert isinstance(yaml.safe_load((REPO / args.custom_config_path).read_text()), dict)
    if script.name in EXTRAS:
        package, extra = EXTRAS[script.name]
        pytest.importorskip(package, reason=f"the extra `{extra}` is not installed: no more checks")
    checked = parse_args(argv=job[2:])
    if job[1] == "train_async.py":
        check_loop(checked, "train_async.py")


def test_the_teachers_answer_does_not_grade_the_evaluation(tiny):
    data, sets = tiny / "tools/sums.jsonl", tiny / "task/eval.yaml"
    sets.unlink()  # a link
    sets.write_text(f"eval:\n  defaults:\n    input_key: prompt\n  datasets:\n    - {{name: sums, path: {data}}}\n")
    submitted(Path("examples/on_policy_distillation/run-tiny-sglang-teacher.sh"), tiny)
    config = yaml.safe_load((tiny / "opd-sglang/eval.yaml").read_text())["eval"]
    assert config["defaults"]["custom_rm_path"] == "examples.tiny_arithmetic.reward.reward"
    assert config["defaults"]["input_key"] == "prompt"


def test_the_data_of_several_tasks_fits_their_graders(tmp_path):
    make_data(tmp_path, seed=1)
    config = yaml.safe_load((tmp_path / "multi_task.yaml").read_text())["eval"]
    entries = [EvalDatasetConfig(**(config["defaults"] | entry)) for entry in config["datasets"]]
    assert [entry.name for entry in entries] == ["sums", "sums_sampled", "choice", "first_step"]
    for entry in entries:
        path = Path(entry.path.partition("@")[0])
        row = json.loads(path.read_text().splitlines()[0])
        info = row.get(entry.metadata_key) or {}
        right = info.get("correct_answer", row["label"])
        args = Namespace(custom_rm_path=None, rm_type=None, rm_url=None, reward_key=None)
        rewards = []
        for digit in (right, str((int(right) + 1) % 10)):
            answer = digit if entry.rm_type == "f1" else f"\\boxed{{{digit}}}"
            sample = Sample(response=answer, label=row["label"], metadata=dict(info) | {"rm_type": entry.rm_type})
            sample.status, sample.custom_rm_path = Sample.Status.COMPLETED, entry.custom_rm_path
            reward = asyncio.run(async_rm(args, sample))
            rewards.append(float(reward[0] if isinstance(reward, tuple) else reward))
        assert rewards == [1.0, 0.0], entry.name
