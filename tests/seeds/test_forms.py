"""Every form of every seed uses existing flags, and a job that does not show what it is for is reported."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from benchmarks import results_page
from slime.compose import flag_groups
from slime.ext.plan.recipe import read_recipe
from slime.flags.cluster import plan_gpus
from slime.flags.parse import build_parser
from tests.seeds.__main__ import COLUMNS, Row, table, write_docs
from tests.seeds.others import OTHERS
from tests.seeds.outcome import Outcome, problems
from tests.seeds.recipes import ALL, ONE_GPU, SEEDS, Job

REPO = Path(__file__).resolve().parents[2]


def test_every_job_names_a_script_and_flags_that_exist() -> None:
    parser = build_parser(with_engine_flags=True, groups=flag_groups())
    for seed in (*SEEDS.values(), *OTHERS.values()):
        assert (REPO / "scripts" / seed.script).exists()
        for form in filter(None, (seed.cpu, seed.gpu)):
            for job in form.jobs:
                text = " ".join((ALL, form.flags, job.flags, ONE_GPU)).format(base="base", save="save", model="")
                _, unknown = parser.parse_known_args(shlex.split(text))
                assert unknown == [], (seed.title, job.layout)


def test_no_job_needs_more_gpus_than_its_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTOR_NUM_NODES", "1")
    parser = build_parser(with_engine_flags=True, groups=flag_groups())
    for seed in (*SEEDS.values(), *OTHERS.values()):
        assert seed.gpu is not None
        monkeypatch.setenv("NUM_GPUS", seed.gpu.environment.get("NUM_GPUS", "2"))
        for job in seed.gpu.jobs:
            text = " ".join((ALL, seed.gpu.flags, job.flags)).format(base="base", save="save", model="")
            recipe = read_recipe(str(REPO / "scripts" / seed.script), shlex.split(text), tmp_path, is_trusted=True)
            args, _ = parser.parse_known_args(recipe.words)
            args.rollout_external = False
            assert plan_gpus(args).num_gpus <= job.num_gpus, (seed.title, job.layout)


def test_a_job_begins_with_the_reference_or_goes_on_from_another_layout() -> None:
    for seed in SEEDS.values():
        for form in filter(None, (seed.cpu, seed.gpu)):
            assert not form.jobs[0].goes_on
            assert any(job.goes_on and job.flags != before.flags for before, job in zip(form.jobs, form.jobs[1:]))


def test_what_a_job_must_show_is_looked_for() -> None:
    job = Job("TP2", "", shows=("eval", "drafts", "filter", "partial", "mtp"), bound=1e-3)
    good = Outcome([1e-4, 1e-3], 3, [0.5], [0.0, 0.1], dropped=1, partial=2, mtp=[1.0], saved=3)
    assert problems(job, good, first_rollout=2) == []
    assert problems(job, Outcome([2e-3, float("nan")], 1, saved=1), first_rollout=2) == [
        "no evaluation is in the record",
        "no drafted token was accepted",
        "the filter dropped no group",
        "no answer was carried into the next rollout",
        "no loss of the MTP layer is in the record",
        "abs(dlogp) 0.002 is above 0.001",
        "1 pushes of 2 rollouts",
        "the last checkpoint is of rollout 1, not 3",
    ]


def test_a_run_of_all_documents_leaves_the_rows_and_notes_of_other_recipes(tmp_path: Path) -> None:
    name = next(name for name, seed in OTHERS.items() if seed.cpu and seed.cpu.gpu_only)
    other = OTHERS[name].title
    write_docs("cpu", table([Row(other, "TP2"), Row(other, "CP2")]), [name], tmp_path)
    for layout in ("TP2", "CP2"):  # the second run has the jobs in another layout
        write_docs("cpu", table([Row(seed.title, layout) for seed in SEEDS.values()]), list(SEEDS), tmp_path)
    run = results_page.load(tmp_path)["seeds_cpu"]
    (kept,) = run["tables"]
    assert kept["columns"] == list(COLUMNS)
    rows = [row[:2] for row in kept["rows"]]
    assert rows == [[other, "TP2"], [other, "CP2"], *([seed.title, "CP2"] for seed in SEEDS.values())]
    said = {note.partition(": measured on ")[0]: note for note in run["notes"][1:]}
    assert list(said) == [other, *(seed.title for seed in SEEDS.values())]
    assert said[other].endswith("; on GPUs only: int4 engine, DeepEP.")
