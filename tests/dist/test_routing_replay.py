"""Routing replay in parallel layouts: one process's gradients and log-probs, whichever rank routes which token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.schedule_case import follow
from tests.dist.trainer_case import write_model
from tests.matrix.layouts import BOUND
from tests.matrix.pool import RankError, RankPool
from tests.matrix.replay_table import References, run_cell

pytestmark = pytest.mark.dist

CELLS = (
    ("qwen3_moe", "TP2 EP2 SP"),
    ("qwen3_moe", "PP2 VPP2"),
    ("qwen3_moe", "CP2 EP2"),
    ("qwen3_moe", "EP2 recompute"),
    ("deepseek_v3", "PP2 recompute"),
    ("glm5", "CP2"),
)
"""Softmax and grouped sigmoid routing, dense layers, both ways of splitting a stream for context parallelism.

`python -m tests.matrix.replay_table` tries every family with experts in many more layouts.
"""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    with RankPool() as pool:
        yield References(pool, tmp_path_factory.mktemp("replay"))


@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_replayed_experts_give_the_gradients_of_one_process(references: References, family: str, layout: str) -> None:
    outcome = run_cell(references, family, layout)
    assert outcome.error < BOUND, f"{outcome.worst} differs by {outcome.error}"
    assert outcome.metrics == pytest.approx(outcome.expected_metrics, rel=1e-6)
    assert min(outcome.metrics.values()) > 0.3, "the routers would choose much the same without being told"


@pytest.fixture(scope="module")
def actor_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("actor")
    write_model(folder, "qwen3_moe")
    return str(folder)


@pytest.mark.parametrize("flags", [(), ("--use-rollout-logprobs",)], ids=["old log-probs", "the engine's log-probs"])
def test_the_actor_records_before_the_first_step_and_replays_in_all(
    references: References, actor_folder: str, flags: tuple[str, ...]
) -> None:
    """Without replay, the routers of the second step, after a step this large, choose differently."""
    common = ("--global-batch-size", 4, "--lr", 0.05, "--use-kl-loss", "--kl-loss-coef", 0.01, *flags)
    (free,) = references.pool.run(follow, 1, actor_folder, common, 1)
    (replayed,) = references.pool.run(follow, 1, actor_folder, (*common, "--use-routing-replay"), 1)
    assert "train/routing_replay_changed" not in free["metrics"][0]
    assert 0.01 < replayed["metrics"][0]["train/routing_replay_changed"] < 1
    assert replayed["metrics"][0]["train/grad_norm"] != free["metrics"][0]["train/grad_norm"]


def test_the_actor_refuses_a_rollout_without_the_engines_experts(references: References, actor_folder: str) -> None:
    with pytest.raises(RankError, match="no rollout_routed_experts, which --use-rollout-routing-replay needs"):
        references.pool.run(follow, 1, actor_folder, ("--use-rollout-routing-replay",), 1)
