"""Grouped experts on CUDA: torch's grouped product against the loop and against fp64, without host waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

from slime.backends.megatron_utils.flags.config_builders import transformer_config_from_args
from slime.backends.megatron_utils.layers.experts import StackedExperts, grouped_linear, has_grouped_product
from slime.backends.megatron_utils.layers.layer_specs import RoutedExperts
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

COUNTS = {
    "even": [64] * 8,
    "ragged": [1, 130, 0, 7, 300, 33, 0, 41],
    "first and last empty": [0, 5, 200, 0, 0, 90, 17, 0],
    "one has all": [0, 0, 0, 512, 0, 0, 0, 0],
}
BF16_BOUND = 1e-2
"""Relative: one rounding of the result, and of the operands' products none."""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def operands(counts: list[int], out: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    return random(sum(counts), size), random(len(counts), out, size), random(sum(counts), out)


def run(x: Tensor, weight: Tensor, counts: Tensor, grad: Tensor, *, grouped: bool) -> tuple[Tensor, ...]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = grouped_linear(x, weight, counts, use_grouped_product=grouped)
    y.backward(grad)
    return y.detach(), x.grad, weight.grad  # type: ignore[return-value]


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("out", "size"), [(96, 64), (64, 96), (1536, 2048), (40, 24)])
def test_the_grouped_product_and_its_gradients_equal_fp64_and_the_loop(counts: list[int], out: int, size: int) -> None:
    x, weight, grad = operands(counts, out, size)
    assert has_grouped_product(x, weight)
    # Freed blocks of memory are full of these, so that rows skipped by a kernel show.
    del (dirt := [torch.full((1 << 22,), torch.nan, device="cuda") for _ in range(8)])[:]
    exact = run(x.double(), weight.double(), torch.tensor(counts), grad.double(), grouped=False)
    grouped = run(x, weight, torch.tensor(counts, device="cuda"), grad, grouped=True)
    looped = run(x, weight, torch.tensor(counts), grad, grouped=False)
    del dirt
    for name, expected, one, other in zip(("output", "x", "weight"), exact, grouped, looped):
        assert relative_error(one, expected) <= BF16_BOUND, name
        assert relative_error(other, expected) <= BF16_BOUND, name
    for index, count in enumerate(counts):
        assert count or not grouped[2][index].any(), f"expert {index} without tokens has a gradient"


def test_a_gradient_with_strides_of_zero_is_taken() -> None:
    x, weight, _ = operands([3, 5], 16, 8)
    x.requires_grad_(), weight.requires_grad_()
    grouped_linear(x, weight, torch.tensor([3, 5], device="cuda"), use_grouped_product=True).sum().backward()
    expected = torch.stack([rows.double().sum(0).expand(16, 8) for rows in x.detach().split([3, 5])])
    assert relative_error(weight.grad, expected) <= BF16_BOUND


def config(*flags: Any) -> Any:
    args = parse(
        *("--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 2, "--ffn-hidden-size", 128, "--swiglu"),
        *("--vocab-size", 64, "--num-experts", 8, "--moe-ffn-hidden-size", 48, "--moe-router-topk", 3, "--bf16"),
        *("--disable-bias-linear", "--normalization", "RMSNorm", "--moe-router-dtype", "fp32", *flags),
    )
    start_single_process(args)
    return transformer_config_from_args(args)


def test_experts_with_and_without_grouping_agree() -> None:
    results = []
    for flags in (("--moe-grouped-gemm",), ()):
        settings = config(*flags)
        experts = StackedExperts(8, settings, pg_collection=get_default_pg_collection())
        generator = torch.Generator("cuda").manual_seed(2)
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cuda") * 0.12)
        counts = torch.tensor([5, 0, 71, 2, 0, 9, 40, 1], device="cuda")
        rows = torch.randn(128, 64, generator=generator, device="cuda").bfloat16().requires_grad_()
        probs = torch.rand(128, generator=generator, device="cuda").requires_grad_()
        output, _ = experts(rows, counts, probs)
        output.float().square().sum().backward()
        results.append((output, rows.grad, probs.grad, *(parameter.grad for parameter in experts.parameters())))
    for one, other in zip(*results):
        assert relative_error(one, other.double()) <= 2 * BF16_BOUND


def test_a_whole_layer_runs_without_a_wait_of_the_host() -> None:
    layer = RoutedExperts(config("--moe-grouped-gemm")).cuda()
    x = torch.randn(96, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x)[0].sum().backward()  # compiles everything
    torch.cuda.set_sync_debug_mode("error")
    try:
        output, _ = layer(x)
        output.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.isfinite().all() and x.grad is not None
