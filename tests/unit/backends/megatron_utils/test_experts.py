"""Stacked experts: the numbers of megatron-core's own, its parameter attributes, its checkpoint entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

from slime.backends.megatron_utils.config_builders import transformer_config_from_args
from slime.backends.megatron_utils.experts import StackedExperts
from slime.utils.errors import ConfigError
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process

NUM_EXPERTS, HIDDEN, FFN = 5, 12, 6
COUNTS = torch.tensor([4, 0, 1, 9, 2])


def config(*flags: Any) -> Any:
    args = parse(
        *("--num-layers", 2, "--hidden-size", HIDDEN, "--num-attention-heads", 2, "--ffn-hidden-size", 16),
        *("--vocab-size", 64, "--num-experts", NUM_EXPERTS, "--moe-ffn-hidden-size", FFN, "--moe-router-topk", 2),
        *("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm", *flags),
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


def test_parameters_say_how_they_are_cut_and_reduced() -> None:
    experts = stacked()
    first, second = experts.linear_fc1.weight, experts.linear_fc2.weight
    assert first.shape == (NUM_EXPERTS, 2 * FFN, HIDDEN) and second.shape == (NUM_EXPERTS, HIDDEN, FFN)
    assert (first.partition_dim, second.partition_dim) == (1, 2)
    assert first.tensor_model_parallel and first.is_stacked_experts
    assert first.allreduce and second.allreduce  # without expert parallelism they are reduced like all others


def test_every_expert_starts_from_other_numbers() -> None:
    weight = stacked().linear_fc1.weight
    assert len({float(matrix.sum()) for matrix in weight}) == NUM_EXPERTS
    assert 0.01 < float(weight.std()) < 0.03


def test_checkpoint_entries_are_the_parameters_under_the_common_names() -> None:
    experts = stacked()
    state = experts.sharded_state_dict("decoder.layers.1.mlp.experts.", ((0, 1, 2),))
    entries = list(state.values())
    assert [entry.key for entry in entries] == [
        "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",
        "decoder.layers.1.mlp.experts.experts.linear_fc2.weight",
    ]
    assert entries[0].data is experts.linear_fc1.weight and entries[1].data is experts.linear_fc2.weight
    assert isinstance(entries[0], ShardedTensorFactory)
    halves = entries[0].build()
    assert halves["gate"].global_shape == (2, NUM_EXPERTS, 2 * FFN, HIDDEN)
    assert halves["gate"].global_offset == (1, 0, 0, 0) and halves["up"].global_offset == (1, 0, FFN, 0)
    joined = entries[0].merge_fn({name: half.data for name, half in halves.items()})
    assert torch.equal(joined, experts.linear_fc1.weight)
    assert entries[1].global_shape == (2, NUM_EXPERTS, HIDDEN, FFN)


def test_biases_in_experts_are_refused() -> None:
    broken = config()
    broken.add_bias_linear = True
    with pytest.raises(ConfigError, match="--disable-bias-linear"):
        StackedExperts(NUM_EXPERTS, broken, pg_collection=get_default_pg_collection())
