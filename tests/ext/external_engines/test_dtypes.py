"""External engines that compute in another dtype than the trainer."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.backends.sglang_utils.sglang_config import trainer_dtype
from slime.ext.external_engines.adopt import warn_of_other_dtype


@pytest.mark.parametrize(
    ("trainer", "served", "advice"),
    [
        ("fp32", "bfloat16", "--dtype float32, or give --bf16 to this run"),
        ("bf16", "half", "--dtype bfloat16, or give --fp16 to this run"),
        ("bf16", "float", "--dtype bfloat16, or give --fp32 to this run"),
        ("fp32", "float32", ""),
        ("fp32", "float", ""),
        ("fp32", "", ""),
    ],
)
def test_an_engine_of_another_dtype_is_named_with_the_flag_to_change(
    trainer: str, served: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    args = Namespace(**{"fp16": False, "bf16": False, "fp32": False} | {trainer: True})
    warn_of_other_dtype("http://10.0.0.1:30000", served=served, trained=trainer_dtype(args))
    assert ("http://10.0.0.1:30000 computes in" in caplog.text) == bool(advice)
    assert advice in caplog.text
