"""The router: its choice against plain references, balancing losses per sample, the counts for the bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_default_pg_collection
from torch import Tensor

from slime.backends.megatron_utils.flags.config_builders import transformer_config_from_args
from slime.backends.megatron_utils.layers.router import RoutedSamples, Router, routers_need_samples
from slime.backends.megatron_utils.train_metrics import ExpertLoad, load_metrics
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process

NUM_EXPERTS, TOPK, HIDDEN = 6, 2, 8
LENGTHS, PADDING = (5, 1, 4), 3
SOFTMAX = ("--moe-router-score-function", "softmax")
SIGMOID = ("--moe-router-score-function", "sigmoid")
BIAS = (*SIGMOID, "--moe-router-enable-expert-bias")


def args_with(*flags: Any) -> Any:
    return parse(
        *("--num-layers", 2, "--hidden-size", HIDDEN, "--num-attention-heads", 2, "--ffn-hidden-size", 16),
        *("--vocab-size", 64, "--num-experts", NUM_EXPERTS, "--moe-router-topk", TOPK, "--moe-router-dtype", "fp32"),
        *("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm", *flags),
    )


def router(*flags: Any) -> Router:
    args = args_with(*flags)
    start_single_process(args)
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    torch.manual_seed(1)
    result = Router(transformer_config_from_args(args), get_default_pg_collection())
    result.set_layer_number(1)
    with torch.no_grad():
        result.weight.normal_(0.0, 0.5)
    return result


def tokens(count: int = sum(LENGTHS) + PADDING) -> Tensor:
    return torch.randn(count, 1, HIDDEN, generator=torch.Generator().manual_seed(2))


def samples(weights: Tensor) -> RoutedSamples:
    sample_of = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    sample_of = torch.cat([sample_of, torch.full((PADDING,), len(LENGTHS))])
    return RoutedSamples(sample_of, torch.tensor(LENGTHS, dtype=torch.float32), weights)


WEIGHTS = torch.tensor([0.5, 2.0, 1.5])


def reference_choice(x: Tensor, weight: Tensor, flags: tuple[Any, ...], bias: Tensor) -> Tensor:
    """[T, E] weights of the chosen experts, token by token, as in the papers."""
    rows = []
    for logits in x[:, 0] @ weight.t():
        scores = logits.sigmoid() if "sigmoid" in flags else logits.softmax(-1)
        ranking = scores + bias if "sigmoid" in flags else scores
        if "--moe-router-group-topk" in flags:
            groups = ranking.view(3, -1)
            best = groups.topk(TOPK // 1, dim=-1).values.sum(-1).argmax()
            ranking = torch.full_like(groups, -torch.inf).index_copy(0, best[None], groups[best][None]).flatten()
        chosen = ranking.topk(TOPK).indices
        row = torch.zeros_like(scores)
        row[chosen] = scores[chosen]
        if "--moe-router-pre-softmax" not in flags or "sigmoid" in flags:
            row = row / row.sum()
        rows.append(row * (2.5 if "--moe-router-topk-scaling-factor" in flags else 1.0))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "flags",
    [
        SOFTMAX,
        (*SOFTMAX, "--moe-router-pre-softmax"),
        SIGMOID,
        (*BIAS, "--moe-router-pre-softmax", "--moe-router-topk-scaling-factor", 2.5),
        (*BIAS, "--moe-router-num-groups", 3, "--moe-router-group-topk", 1),
    ],
    ids=["softmax", "pre-softmax", "sigmoid", "bias", "groups"],
)
def test_experts_and_their_weights_are_those_of_the_formula(flags: tuple[Any, ...]) -> None:
    layer = router(*flags)
    bias = torch.linspace(-0.5, 0.5, NUM_EXPERTS) if layer.expert_bias is not None else torch.zeros(NUM_EXPERTS)
    if layer.expert_bias is not None:
        layer.expert_bias.copy_(bias)
    probs, routing_map = layer(tokens())
    expected = reference_choice(tokens(), layer.weight, flags, bias)
    assert torch.equal(routing_map, expected > 0)
    torch.testing.assert_close(probs, expected)


def reference_balance(scores: Tensor) -> Tensor:
    """E * sum over experts of (share of the choices) * (mean score), for the tokens of one group."""
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(TOPK).indices, 1.0)
    return NUM_EXPERTS * (chosen.mean(0) / TOPK * scores.mean(0)).sum()


def reference_loss(layer: Router, x: Tensor, kind: str) -> Tensor:
    logits = x[: sum(LENGTHS), 0] @ layer.weight.t()
    pieces = logits.split(LENGTHS)
    if kind == "z_loss":
        return sum(w * piece.logsumexp(-1).square().mean() for w, piece in zip(WEIGHTS, pieces))
    if kind == "seq_aux_loss":
        return sum(w * reference_balance(piece.softmax(-1)) for w, piece in zip(WEIGHTS, pieces))
    return WEIGHTS.sum() * reference_balance(logits.softmax(-1))


FLAGS_OF = {
    "seq_aux_loss": ("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", 0.3),
    "aux_loss": ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", 0.3),
    "z_loss": ("--moe-z-loss-coeff", 0.3),
}


@pytest.mark.parametrize("kind", FLAGS_OF)
def test_balancing_losses_weigh_samples_and_pass_over_padding(kind: str) -> None:
    layer = router(*SOFTMAX, *FLAGS_OF[kind])
    layer.samples = samples(WEIGHTS)
    x = tokens()
    (expected,) = torch.autograd.grad(0.3 * reference_loss(layer, x, kind), layer.weight)
    probs, _ = layer(x)
    (probs.sum() * 0.0).backward()  # the loss itself has no gradient here; only the balancing loss has
    torch.testing.assert_close(layer.weight.grad, expected)


def test_the_bias_counts_real_tokens_once_and_moves_towards_the_unloaded() -> None:
    layer = router(*BIAS, "--moe-router-bias-update-rate", 0.25)
    layer.samples = samples(WEIGHTS)
    with torch.no_grad():
        layer(tokens())  # a log-prob pass, or the first pass of a recomputed layer
    assert not layer.local_tokens_per_expert.any()
    _, routing_map = layer(tokens())
    counts = routing_map[: sum(LENGTHS)].sum(0).float()
    assert torch.equal(layer.local_tokens_per_expert, counts)
    _update_router_expert_bias([layer], layer.config)
    assert torch.equal(layer.expert_bias, 0.25 * (counts.mean() - counts).sign())


@pytest.mark.parametrize("flags", [SOFTMAX, BIAS], ids=["without a bias", "with one"])
def test_the_load_of_a_step_is_that_of_its_real_tokens(flags: tuple[Any, ...]) -> None:
    layer = router(*flags)
    load = ExpertLoad([torch.nn.ModuleDict({"layer": layer, "mtp": router(*flags)})], num_layers=2, num_experts=6)
    layer.samples = samples(WEIGHTS)
    with torch.no_grad():
        layer(tokens())  # a log-prob pass, or the first pass of a recomputed layer
    counts = sum(layer(tokens())[1][: sum(LENGTHS)].sum(0).double() for _ in range(2))
    metrics = load.take_metrics()
    assert metrics["expert_load/layer_1/max_over_mean"] == pytest.approx(float(counts.max() / counts.mean()))
    assert metrics["expert_load/layer_1/idle"] == int((counts == 0).sum()) / NUM_EXPERTS
    assert not any("layer_2" in name for name in metrics)
    assert load.take_metrics() == {}  # counts restart with each step


def test_the_balance_of_the_layers_by_hand() -> None:
    counts = torch.tensor([[2, 2, 2, 2], [8, 0, 0, 0], [0, 0, 0, 0], [4, 3, 1, 0]])
    assert load_metrics(counts) == {
        "expert_load/layer_1/max_over_mean": 1.0,
        "expert_load/layer_1/idle": 0.0,
        "expert_load/layer_2/max_over_mean": 4.0,
        "expert_load/layer_2/idle": 0.75,
        "expert_load/layer_4/max_over_mean": 2.0,
        "expert_load/layer_4/idle": 0.25,
        "expert_load/worst_max_over_mean": 4.0,
        "expert_load/worst_idle": 0.75,
    }


def test_the_bias_stays_fp32_when_the_model_becomes_bf16() -> None:
    layer = router(*BIAS)
    bias = torch.randn(NUM_EXPERTS)
    layer.expert_bias.copy_(bias)
    layer.bfloat16()
    assert layer.weight.dtype == torch.bfloat16
    assert layer.expert_bias.dtype == torch.float32 and torch.equal(layer.expert_bias, bias)


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        (("--moe-aux-loss-coeff", 0), False),
        (FLAGS_OF["seq_aux_loss"], True),
        (FLAGS_OF["z_loss"], True),
        ((*BIAS, "--moe-router-bias-update-rate", 0), False),
        ((*BIAS, "--moe-router-bias-update-rate", 1e-3), True),
        (("--log-expert-load",), True),
    ],
)
def test_routers_are_told_of_samples_only_where_it_matters(flags: tuple[Any, ...], needed: bool) -> None:
    args = args_with(*flags)
    assert routers_need_samples(transformer_config_from_args(args), logs_load=args.log_expert_load) is needed
