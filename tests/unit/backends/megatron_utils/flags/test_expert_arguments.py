"""Flags of experts: which are mapped to an equivalent, and which are refused with the flag to change."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from slime.utils.errors import ConfigError
from tests.unit.backends.megatron_utils.megatron_case import parse

MODEL = (
    *("--num-layers", 78, "--hidden-size", 8, "--num-attention-heads", 2, "--ffn-hidden-size", 16, "--swiglu"),
    *("--vocab-size", 64, "--num-experts", 12, "--moe-router-topk", 4, "--disable-bias-linear"),
)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--moe-layer-freq", "[0]*3+[1]*74"), "77 entries"),
        (("--moe-layer-freq", "[2]*78"), "entries"),
        (("--moe-layer-freq", 0), "at least 1"),
        (("--moe-router-topk", 13), "--num-experts 12"),
        (("--moe-router-num-groups", 5, "--moe-router-group-topk", 2), "should be divisible by"),
        (("--moe-router-num-groups", 6, "--moe-router-group-topk", 1), "2 experts each"),
        (("--moe-router-load-balancing-type", "global_aux_loss", "--moe-aux-loss-coeff", 0.1), "seq_aux_loss"),
        (("--add-bias-linear", "--moe-shared-expert-intermediate-size", 8), "--disable-bias-linear"),
    ],
)
def test_what_cannot_work_is_refused(flags: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*MODEL, *flags)


def test_flags_of_missing_packages_are_mapped_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        args = parse(
            *(*MODEL, "--moe-enable-deepep", "--moe-token-dispatcher-type", "flex", "--moe-permute-fusion"),
            "--moe-grouped-gemm",
        )
    assert args.moe_token_dispatcher_type == "alltoall" and not args.moe_enable_deepep and not args.moe_permute_fusion
    assert args.moe_grouped_gemm  # torch's grouped product
    assert sum("DeepEP" in record.getMessage() for record in caplog.records) == 1
    assert sum("--moe-permute-fusion" in record.getMessage() for record in caplog.records) == 1
