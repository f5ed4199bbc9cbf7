"""Which weights the teacher server scores with."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields

import pytest

from slime.ext.distill import scorer
from slime.ext.distill.flags import TeacherServerConfig
from slime.ext.distill.scorer import Scorer
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process


def test_the_iteration_of_the_first_weights_is_not_that_of_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {field.name: 1 for field in fields(TeacherServerConfig)}
    start_single_process(parse("--num-layers", 1, "--hidden-size", 8, "--num-attention-heads", 1, "--vocab-size", 8))
    args = Namespace(**config, load="first", hf_checkpoint="hf", ckpt_step=3)
    loaded: list[tuple[str, int | None]] = []
    monkeypatch.setattr(scorer, "build_model", lambda *args, **options: [])
    monkeypatch.setattr(scorer, "load_checkpoint", lambda args, model: loaded.append((args.load, args.ckpt_step)))
    Scorer(args).load("second")
    assert loaded == [("first", 3), ("second", None)]
