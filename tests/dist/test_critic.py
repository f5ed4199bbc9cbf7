"""PPO's critic: the same values and steps in every layout, and exact resumes.

The worlds are pools: a process builds the critic, and the actor that gets its values, for each layout in turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.critic_case import resume_critics, run_ppo
from tests.dist.trainer_case import run_workers, write_model

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]

LAYOUTS: dict[str, tuple[str, ...]] = {
    "two data-parallel ranks": (),
    "two tensor-parallel ranks": ("--tensor-model-parallel-size", "2"),
    "two tensor-parallel ranks with sequence parallelism": (
        "--tensor-model-parallel-size",
        "2",
        "--sequence-parallel",
    ),
    "two pipeline stages": ("--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "2"),
    "two context-parallel ranks": ("--context-parallel-size", "2"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("critic")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def one_process(folder: Path) -> Any:
    (results,) = run_workers(run_ppo, 1, str(folder), [()])
    return merge([results[0]])


@pytest.fixture(scope="module")
def two_processes(folder: Path) -> dict[str, Any]:
    ranks = run_workers(run_ppo, 2, str(folder), list(LAYOUTS.values()), timeout_s=240)
    return {name: merge([results[index] for results in ranks]) for index, name in enumerate(LAYOUTS)}


def merge(ranks: list[Any]) -> tuple[list[dict[int, list[float]]], Any, Any]:
    """(values of both rollouts, parameters, the actor's metrics) of all ranks together."""
    values: list[dict[int, list[float]]] = [{}, {}]
    parameters: Any = {}
    metrics = None
    for rank_values, rank_parameters, rank_metrics in ranks:
        for whole, part in zip(values, rank_values, strict=False):
            whole.update(part)
        parameters |= rank_parameters
        metrics = metrics or rank_metrics
    return values, parameters, metrics


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_the_actors_step_do_not_depend_on_the_layout(one_process, two_processes, layout):
    values, _, metrics = two_processes[layout]
    expected, _, expected_metrics = one_process
    assert sorted(values[0]) == sorted(expected[0]) == list(range(9))
    for ours, theirs in zip(values, expected, strict=True):
        for position, value in theirs.items():
            assert ours[position] == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert any(
        abs(a - b) > 1e-3 for a, b in zip(expected[0][6], expected[1][6], strict=True)
    )  # the step had an effect
    names = [name for name in expected_metrics if name.startswith(("train/", "rollout/"))]
    assert {"rollout/values", "rollout/returns", "rollout/advantages", "train/pg_loss"} <= set(names)
    assert {name: metrics[name] for name in names} == pytest.approx(
        {name: expected_metrics[name] for name in names}, rel=1e-5, abs=2e-6
    )


def test_a_critic_resumes_bit_for_bit_and_in_another_layout(folder, one_process, two_processes):
    cases = [("save1-0", ()), ("save2-2", ())]  # saved by one process, and by two tensor-parallel ranks
    (same, elsewhere) = run_workers(resume_critics, 1, str(folder), cases)[0]
    assert same == (1, one_process[0][1], one_process[1])
    for position, value in one_process[0][1].items():
        assert elsewhere[1][position] == pytest.approx(value, rel=1e-5, abs=1e-5)
