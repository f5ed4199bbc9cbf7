"""Stacked experts: results equal megatron-core's, parameter attributes, checkpoint entries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

from slime.backends.megatron_utils.flags.config_builders import transformer_config_from_args
from slime.backends.megatron_utils.layers.experts import (
    StackedExperts,
    StackedLinear,
    grouped_linear,
)
from slime.utils.errors import ConfigError
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process

NUM_EXPERTS, HIDDEN, FFN = 5, 12, 6
COUNTS = torch.tensor([4, 0, 1, 9, 2])
WITH_BIASES = "biases"
GPT_OSS = (WITH_BIASES, "--quick-geglu", "--glu-linear-offset", 1.0, "--activation-func-clamp-value", 0.01)


def config(*flags: Any) -> Any:
    kind = ("--disable-bias-linear",) * (WITH_BIASES not in flags) + ("--swiglu",) * ("--quick-geglu" not in flags)
    args = parse(
        *("--num-layers", 2, "--hidden-size", HIDDEN, "--num-attention-heads", 2, "--ffn-hidden-size", 16),
        *("--vocab-size", 64, "--num-experts", NUM_EXPERTS, "--moe-ffn-hidden-size", FFN, "--moe-router-topk", 2),
        *("--normalization", "RMSNorm", *kind, *(flag for flag in flags if flag != WITH_BIASES)),
    )
    start_single_process(args)
    return transformer_config_from_args(args)


def stacked(*flags: Any) -> StackedExperts:
    return StackedExperts(NUM_EXPERTS, config(*flags), pg_collection=get_default_pg_collection())


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(int(COUNTS.sum()), HIDDEN, generator=generator, requires_grad=True)
    return rows, torch.rand(len(rows), generator=generator).requires_grad_()


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--no-bias-swiglu-fusion",),
        ("--activation-func-clamp-value", 0.01, "--no-bias-swiglu-fusion"),
        ("--moe-grouped-gemm", "--recompute-granularity", "selective", "--recompute-modules", "moe_act"),
    ],
    ids=["fused", "plain", "clamped", "recomputed"],
)
def test_outputs_and_gradients_are_those_of_megatron_cores_experts(flags: tuple[Any, ...]) -> None:
    ours = stacked(*flags)
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    theirs = SequentialMLP(NUM_EXPERTS, ours.config, parts, pg_collection=get_default_pg_collection())
    with torch.no_grad():
        for index, expert in enumerate(theirs.local_experts):
            expert.linear_fc1.weight.copy_(ours.linear_fc1.weight[index])
            expert.linear_fc2.weight.copy_(ours.linear_fc2.weight[index])
    results = []
    for module in (ours, theirs):
        rows, probs = inputs()
        output, bias = module(rows, COUNTS, probs)
        assert bias is None
        (output * torch.linspace(-1, 1, HIDDEN)).sum().backward()
        results.append((output.detach(), rows.grad, probs.grad))
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected)
    for name in ("linear_fc1", "linear_fc2"):
        expected = torch.stack([getattr(expert, name).weight.grad for expert in theirs.local_experts])
        torch.testing.assert_close(getattr(ours, name).weight.grad, expected)


def of_gpt_oss(experts: StackedExperts, rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(1.702 gate), both clamped, between two matrices with biases, times a probability."""
    out, first, second = [], experts.linear_fc1, experts.linear_fc2
    for index, (x, prob) in enumerate(zip(rows.split(COUNTS.tolist()), probs.split(COUNTS.tolist()))):
        gate, up = (x @ first.weight[index].T + first.bias[index]).chunk(2, dim=-1)
        gate, up = gate.clamp(max=0.01), up.clamp(-0.01, 0.01)
        inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        out.append((inner @ second.weight[index].T + second.bias[index]) * prob[:, None])
    return torch.cat(out)


@pytest.mark.parametrize(
    "flags",
    [GPT_OSS, (*GPT_OSS, "--recompute-granularity", "selective", "--recompute-modules", "moe_act")],
    ids=["plain", "recomputed"],
)
def test_biases_and_the_clamped_gate_are_those_of_the_formula(flags: tuple[Any, ...]) -> None:
    experts = stacked(*flags, "--moe-grouped-gemm")
    with torch.no_grad():
        for linear in experts.children():
            linear.bias.copy_(torch.linspace(-0.1, 0.1, linear.bias.numel()).view_as(linear.bias))
    results = []
    for compute in (lambda *given: experts(given[0], COUNTS, given[1])[0], partial(of_gpt_oss, experts)):
        rows, probs = inputs()
        experts.zero_grad()
        output = compute(rows, probs)
        (output * torch.linspace(-1, 1, HIDDEN)).sum().backward()
        grads = [parameter.grad.clone() for parameter in experts.parameters()]
        results.append((output.detach(), rows.grad, probs.grad, *grads))
    assert len(results[0]) == 7
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected)


def test_drawing_them_leaves_the_generators_of_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    settings = config()  # seeds all modules
    seeds.clear()
    StackedExperts(NUM_EXPERTS, settings, pg_collection=get_default_pg_collection())
    assert seeds == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--expert-tensor-parallel-size", 2, "--tensor-model-parallel-size", 2, "--actor-num-gpus-per-node", 2),
            "Bias in Moe is only supported when ETP==1",
        ),
        (("--moe-shared-expert-intermediate-size", 8), "shared experts have no biases here"),
    ],
)
def test_experts_with_biases_are_not_cut_nor_shared(flags: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*GPT_OSS, *flags)


@dataclass
class Group:
    """A process group with what the parameters use."""

    place: int
    count: int

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.count


def parts_of(name: str, ep: int, etp: int) -> list[StackedLinear]:
    """One matrix of four experts as each rank of a layout holds it, from the same seed."""
    settings, parts = config("--num-experts", 4), []
    is_gated = name == "linear_fc1"
    for ep_rank in range(ep):
        for etp_rank in range(etp):
            torch.manual_seed(11)
            groups = SimpleNamespace(ep=Group(ep_rank, ep), expt_tp=Group(etp_rank, etp), expt_dp=Group(0, 1))
            sizes = (HIDDEN, 2 * FFN) if is_gated else (FFN, HIDDEN)
            options = {"split_axis": 1 if is_gated else 2, "is_gated": is_gated}
            initial = {"init_method": settings.init_method}
            parts.append(StackedLinear(settings, groups, 4 // ep, *sizes, **options, **initial))
    return parts


def assembled(parts: list[StackedLinear]) -> torch.Tensor:
    """The whole tensor of a checkpoint, from the entries of all ranks; checks that each element is written once."""
    whole = times = None
    for part in parts:
        entry = part.sharded_entries("key.", ((0, 1, 3),))["weight"]
        pieces = list(entry.build().values()) if isinstance(entry, ShardedTensorFactory) else [entry]
        for piece in pieces:
            if whole is None:
                whole, times = torch.zeros(piece.global_shape[1:]), torch.zeros(piece.global_shape[1:])
            assert piece.global_shape == (3, *whole.shape) and piece.global_offset[0] == 1
            where = tuple(slice(o, o + n) for o, n in zip(piece.global_offset[1:], piece.data.shape))
            whole[where] = piece.data.detach()
            times[where] += 1
    assert (times == 1).all()
    return whole


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (1, 2), (2, 3), (4, 2)])
@pytest.mark.parametrize("name", ["linear_fc1", "linear_fc2"])
def test_every_layout_starts_from_the_same_experts_and_saves_the_same_tensor(name: str, ep: int, etp: int) -> None:
    (whole,) = parts_of(name, 1, 1)
    # In the checkpoint, as in the whole parameter, gates come before ups, whatever the ranks hold.
    assert torch.equal(assembled([whole]), whole.weight)
    parts = parts_of(name, ep, etp)
    assert len({part.weight.shape for part in parts}) == 1
    assert torch.equal(assembled(parts), whole.weight)


def test_checkpoints_are_exchanged_with_megatron_cores_experts(tmp_path: Path) -> None:
    ours = stacked()
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    theirs = SequentialMLP(NUM_EXPERTS, ours.config, parts, pg_collection=get_default_pg_collection())
    dist_checkpointing.save(theirs.sharded_state_dict("mlp.experts."), str(tmp_path))
    loaded = dist_checkpointing.load(ours.sharded_state_dict("mlp.experts."), str(tmp_path))
    for name in ("linear_fc1", "linear_fc2"):
        expected = torch.stack([getattr(expert, name).weight for expert in theirs.local_experts])
        assert torch.equal(loaded[f"mlp.experts.{name}.weight"], expected)


# One matrix product per expert, against fp64; some experts have no tokens.


LOCAL_COUNTS = [3, 0, 7, 1, 0]


def test_each_expert_multiplies_its_own_rows_and_gradients_are_those_of_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(11, 4, generator=generator, dtype=torch.float64)
    expected = torch.cat([rows @ matrix.t() for rows, matrix in zip(x.split(LOCAL_COUNTS), weight)])
    expected_grads = torch.autograd.grad(expected, (x, weight), grad)

    y = grouped_linear(x, weight, torch.tensor(LOCAL_COUNTS), use_grouped_product=True)
    torch.testing.assert_close(y, expected)
    for actual, wanted in zip(torch.autograd.grad(y, (x, weight), grad), expected_grads):
        torch.testing.assert_close(actual, wanted)


def test_a_rank_whose_experts_get_no_tokens_still_has_gradients() -> None:
    x, weight = torch.ones(0, 4, requires_grad=True), torch.ones(2, 3, 4, requires_grad=True)
    grouped_linear(x, weight, torch.tensor([0, 0]), use_grouped_product=True).sum().backward()
    assert x.grad is not None and weight.grad is not None and not weight.grad.any()
