"""Replayed experts in parallel layouts: gradients and log-probs of one process, whoever routes which token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.matrix.layouts import BOUND
from tests.matrix.pool import RankPool
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
"""Softmax and grouped sigmoid routing, dense layers, both ways of cutting a stream for context parallelism.

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
