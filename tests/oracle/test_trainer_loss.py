"""The trainer's own loss function on real ranks and in one process, against the reference: the same advantages,
loss, metrics and gradient of every step, however it is packed and split.

While ``test_split_invariance`` runs the pure pieces in one process, parallel state, gathers and gradient
collectives are the trainer's here, and only the model is a table of bigram logits.  ``python -m tests.algorithms``
runs every variant in every layout.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.matrix.pool import RankPool
from tests.oracle.agreement import errors_of_cell
from tests.oracle.trainer import Cell, run_cells
from tests.oracle.variants import CELLS, LAYOUTS, SEEDS

MEETS_OTHER_RANKS = ("grpo", "gspo", "ppo", "reinforce", "per_token", "opsm", "distilled", "critic", "tis", "sft")
"""Variants with their own communication between ranks."""


def cells_for(world_size: int) -> list[tuple[str, str, str]]:
    """Every variant under CP2, every packing under DP2, and dependent cells in the other layouts."""
    if world_size == 4:
        return [("dp2_cp2", variant, "dynamic") for variant in MEETS_OTHER_RANKS]
    return [
        (layout, variant, packing)
        for layout in LAYOUTS[2]
        for variant, packing in CELLS
        if (variant in MEETS_OTHER_RANKS and packing == "dynamic")
        or layout == "cp2"
        or (layout == "dp2" and packing != "dynamic")
    ]


CHOSEN = [cell for world_size in LAYOUTS for cell in cells_for(world_size)]


@pytest.fixture(scope="module")
def ranks() -> dict[Cell, list[dict[str, Any]]]:
    """[cell][rank] results; all tests here share one start of the processes."""
    with RankPool() as pool:
        return run_cells(pool, [(*cell, seed) for cell in CHOSEN for seed in SEEDS])


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "variant", "packing"), CHOSEN)
def test_a_rollout_gives_what_the_reference_gives(ranks, layout, variant, packing):
    for seed in SEEDS:
        errors = errors_of_cell(variant, seed, ranks[layout, variant, packing, seed])
        assert errors.within_bounds(), (seed, errors)
