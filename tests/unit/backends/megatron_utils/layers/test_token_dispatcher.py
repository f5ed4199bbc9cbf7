"""Token dispatch to experts and back: rows, counts and gradients equal megatron-core's dispatcher; sums in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from slime.backends.megatron_utils.flags.config_builders import transformer_config_from_args
from slime.backends.megatron_utils.layers.layer_specs import RoutedExperts
from slime.backends.megatron_utils.layers.token_dispatcher import GatherDispatcher
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process

NUM_EXPERTS, TOPK, HIDDEN, NUM_TOKENS = 6, 3, 8, 11


def config(*flags: Any) -> Any:
    args = parse(
        *("--num-layers", 2, "--hidden-size", HIDDEN, "--num-attention-heads", 2, "--ffn-hidden-size", 16),
        *("--vocab-size", 64, "--num-experts", NUM_EXPERTS, "--moe-router-topk", TOPK),
        *("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm", *flags),
    )
    start_single_process(args)
    return transformer_config_from_args(args)


def routing() -> tuple[Tensor, Tensor]:
    """Probabilities [T, E] with k chosen experts per row, and the choice; the last expert gets no token."""
    scores = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(4))
    scores[:, -1] = 0.0
    routing_map = torch.zeros_like(scores).scatter(1, scores.topk(TOPK).indices, 1.0).bool()
    return (scores * routing_map).requires_grad_(), routing_map


def run(dispatcher: Any, tokens: Tensor) -> list[Tensor]:
    """Rows, counts, probabilities, the combined output, and both gradients."""
    probs, routing_map = routing()
    rows, counts, row_probs = dispatcher.dispatch_postprocess(
        *dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(tokens, routing_map, probs))
    )
    outputs = (rows * row_probs[:, None]).sin()
    result = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(outputs)))
    (result * torch.linspace(-1, 1, HIDDEN)).sum().backward()
    assert tokens.grad is not None and probs.grad is not None
    return [rows.detach(), counts, row_probs.detach(), result.detach(), tokens.grad, probs.grad]


def tokens_like(dtype: torch.dtype) -> Tensor:
    x = torch.randn(NUM_TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(5))
    return x.to(dtype).requires_grad_()


def test_rows_results_and_gradients_are_those_of_megatron_cores_dispatcher() -> None:
    settings, groups = config(), get_default_pg_collection()
    ours = run(GatherDispatcher(NUM_EXPERTS, settings, groups), tokens_like(torch.float64))
    indices = list(range(NUM_EXPERTS))
    stock = MoEAlltoAllTokenDispatcher(NUM_EXPERTS, indices, settings, groups)
    for actual, expected in zip(ours, run(stock, tokens_like(torch.float64)), strict=True):
        torch.testing.assert_close(actual, expected)
    assert ours[1].tolist()[-1] == 0 and ours[1].sum() == NUM_TOKENS * TOPK


def test_outputs_of_a_tokens_experts_are_added_up_in_fp32() -> None:
    dispatcher = GatherDispatcher(NUM_EXPERTS, config(), get_default_pg_collection())
    probs, routing_map = routing()
    tokens = torch.ones(NUM_TOKENS, 1, HIDDEN, dtype=torch.bfloat16)
    rows, *_ = dispatcher.dispatch_postprocess(*dispatcher.dispatch_preprocess(tokens, routing_map, probs))
    # 256 + 1 + 1: in bf16 each step rounds back to 256, in fp32 the sum is 258.
    rows = torch.ones_like(rows)
    rows[dispatcher.to_experts.copies_by_row[::TOPK]] = 256.0
    assert (dispatcher.combine_postprocess(dispatcher.combine_preprocess(rows)) == 258.0).all()


@pytest.mark.parametrize(
    ("flags", "is_ours"),
    [
        ((), True),
        (("--moe-permute-fusion",), True),
        (
            ("--moe-token-dispatcher-type", "flex", "--moe-enable-deepep"),
            True,
        ),  # without DeepEP it falls back to alltoall
        (("--moe-flex-dispatcher-backend", "deepep", "--moe-token-dispatcher-type", "flex"), True),
        (("--moe-token-dispatcher-type", "allgather"), True),
        (("--moe-expert-capacity-factor", 1.0), False),  # drops tokens, so tokens do not have k experts each
    ],
)
def test_which_dispatcher_serves_which_flags(flags: tuple[Any, ...], is_ours: bool) -> None:
    layer = RoutedExperts(config(*flags))
    assert isinstance(layer.token_dispatcher, GatherDispatcher) is is_ours
