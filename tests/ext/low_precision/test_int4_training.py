"""Int4 quantization-aware training computes what an engine serves after a push of packed int4 weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.ext.low_precision.rounding import rounded_to_int4
from tests.matrix.case import read_tensors
from tests.matrix.int4_training import DENSE_FLAGS, GROUP, Int4Run, case_of
from tests.matrix.layouts import run_layouts
from tests.matrix.report import summary

pytestmark = pytest.mark.dist
BOUND = 1e-5


@pytest.mark.parametrize(("family", "rounds_dense"), [("qwen3_moe", False), ("qwen3_moe", True), ("qwen3", True)])
def test_the_trainer_computes_what_the_pushed_engine_does(tmp_path: Path, family: str, rounds_dense: bool) -> None:
    run = Int4Run(case_of(family), tmp_path, rounds_dense=rounds_dense)
    quantized = run.quantized_names()
    assert any(".experts." in name for name in quantized) == (family == "qwen3_moe")
    assert any("self_attn" in name for name in quantized) == rounds_dense

    rounded, plain = run.rounded_weights(), read_tensors(run.plain_folder)
    assert rounded.keys() == quantized
    for name, value in rounded.items():
        assert torch.equal(value, rounded_to_int4(plain[name], GROUP)), name
        assert torch.equal(value, run.served[name]), name
        assert not torch.equal(value, plain[name]), name

    difference, _, detail = run.log_probs()
    assert difference < BOUND, detail
    difference, bound, detail = run.gradients()
    assert difference < bound, detail


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_two_ranks_equal_one_process(family: str) -> None:
    case = case_of(family)
    names = ["TP2 SP", *(["EP2", "TP2 ETP2 SP"] if case.has_experts else [])]
    cells = run_layouts([case], names, loss_flags=DENSE_FLAGS)
    assert [cell.column for cell in cells] == names
    assert all(cell.passed for cell in cells), summary(cells)
