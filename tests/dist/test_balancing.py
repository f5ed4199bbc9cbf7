"""Balancing losses and an updated router bias are the same in every layout and packing."""

from __future__ import annotations

import pytest

from tests.matrix import layouts
from tests.matrix.case import load_cases
from tests.matrix.layouts import Layout, run_layouts
from tests.matrix.report import summary

pytestmark = pytest.mark.dist

FAMILY = "glm4_moe-groups"
BALANCING = (
    *("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", 0.5),
    *("--moe-z-loss-coeff", 0.05, "--moe-router-bias-update-rate", 0.05),
)
PER_TOKEN = (*BALANCING, "--calculate-per-token-loss")
EXPERT_RANKS = ("--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1)
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules", "moe")
CELLS = {
    "fuller bins": Layout(1, ("--max-tokens-per-gpu", 90), loss_flags=BALANCING),
    "DP2": Layout(2, (), loss_flags=BALANCING),
    "EP2 recompute": Layout(2, (*EXPERT_RANKS, *RECOMPUTE), loss_flags=BALANCING),
    "CP2 EP2 per-token": Layout(2, ("--context-parallel-size", 2, *EXPERT_RANKS, *SELECTIVE), loss_flags=PER_TOKEN),
    "TP2 EP2": Layout(
        2, ("--tensor-model-parallel-size", 2, "--sequence-parallel", *EXPERT_RANKS), loss_flags=BALANCING, tensor=2
    ),
}


def test_balancing_and_bias_updates_equal_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "LAYOUTS", CELLS)
    cells = run_layouts([load_cases([FAMILY])[FAMILY]], list(CELLS))
    assert len(cells) == len(CELLS)
    assert all(cell.passed for cell in cells), summary(cells)
