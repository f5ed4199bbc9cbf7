"""Adapters of a trainer that releases its memory between rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.ext.lora.frozen_base import hold_quantized
from tests.dist.test_sleep import check_sleep as check_ranks
from tests.dist.trainer_case import write_model
from tests.unit.backends.megatron_utils.test_sleep import build_with, check_sleep, new_memory_holds_anything

__all__ = ["new_memory_holds_anything"]
CASES = {
    "adapters": ("qwen3", "--bf16 --lora-rank 4"),
    "adapters over int4": ("qwen3_moe", "--bf16 --lora-rank 4 --lora-base-precision int4"),
}


@pytest.mark.parametrize("case", CASES)
def test_sleeping_between_rollouts_changes_no_bit(tmp_path: Path, case: str) -> None:
    family, flags = CASES[case]
    write_model(tmp_path, family)

    def build() -> tuple[Any, Any, Any, Any]:
        args, model, optimizer, scheduler = build_with(tmp_path, flags)
        if args.lora_base_precision is not None:
            hold_quantized(model, args.lora_base_precision)
        return args, model, optimizer, scheduler

    check_sleep(build, has_copies=True)


@pytest.mark.dist
@pytest.mark.parametrize("experts", ["each", "shared"])
def test_a_trainer_that_sleeps_does_what_one_does_that_never_sleeps(tmp_path: Path, experts: str) -> None:
    parallel = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
    check_ranks(tmp_path, "qwen3_moe", (*parallel, "--lora-rank", 4, "--lora-experts", experts))
