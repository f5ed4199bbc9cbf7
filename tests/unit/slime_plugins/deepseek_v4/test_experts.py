"""Routers of DeepSeek-V4: weights, choices and the updated bias, with values by hand."""

from __future__ import annotations

import torch

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

from slime.backends.megatron_utils.flags.config_builders import transformer_config_from_args
from slime.backends.megatron_utils.layers.router import RoutedSamples
from slime_plugins.models.deepseek_v4.experts import SqrtSoftplusRouter, TableRouter, TokenInputs
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process

SCORES = torch.tensor([[1.0, 2, 3, 0.5], [4, 1, 1, 2], [9, 1, 1, 8]])
"""sqrt(softplus(logit)) of two tokens and of padding, for four experts."""


def routers() -> torch.nn.ModuleDict:
    """Routers whose logits are their inputs; two experts per token, whose weights add up to 3."""
    args = parse(
        *("--num-layers", 2, "--hidden-size", 4, "--num-attention-heads", 2, "--ffn-hidden-size", 8),
        *("--vocab-size", 64, "--num-experts", 4, "--moe-router-topk", 2, "--moe-router-dtype", "fp32"),
        *("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm", "--moe-router-topk-scaling-factor", 3),
        *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
        *("--moe-router-bias-update-rate", 0.25),
    )
    start_single_process(args)
    config, groups = transformer_config_from_args(args), get_default_pg_collection()
    table, scored = TableRouter(config, groups), SqrtSoftplusRouter(config, groups)
    table.take_table(torch.tensor([[3, 1], [0, 0], [2, 2]]))
    scored.expert_bias.copy_(torch.tensor([0, 0, -2.2, 0]))
    samples = RoutedSamples(torch.tensor([0, 0, 1]), torch.tensor([2.0]), torch.ones(1))
    for router in (table, scored):
        router.weight.data.copy_(torch.eye(4))
        router.take(TokenInputs(samples, None, torch.tensor([2, 0, 1])))
    return torch.nn.ModuleDict({"table": table, "scored": scored})


def test_scores_choose_and_only_routers_that_choose_by_them_move_their_bias() -> None:
    layers = routers()
    logits = SCORES.double().square().expm1().log().float()[:, None]
    by_table, by_score = layers["table"](logits)[0], layers["scored"](logits)[0]
    # If a table names an expert twice, it gets the whole weight.
    torch.testing.assert_close(by_table[:2], torch.tensor([[0.0, 0, 3, 0], [0, 1, 0, 2]]))
    torch.testing.assert_close(by_score[:2], torch.tensor([[1.0, 2, 0, 0], [2, 0, 0, 1]]))
    _update_router_expert_bias([layers], layers["scored"].config)
    # Counts two, one, none and one, where the mean is one; padding does not count.
    torch.testing.assert_close(layers["scored"].expert_bias, torch.tensor([-0.25, 0, -1.95, 0]))
    assert not hasattr(layers["table"], "expert_bias") and "table.table" not in layers.state_dict()
