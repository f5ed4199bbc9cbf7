"""The flash kernel with sinks against the formula: outputs and all gradients, with windows and fewer key heads."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.layers.attention import per_sequence_attention
from slime.backends.megatron_utils.layers.sink_attention import varlen_sink_attention

pytestmark = pytest.mark.gpu(1)


@pytest.mark.parametrize("window", [None, 1, 128])
@pytest.mark.parametrize("fewer_queries", [False, True], ids=["whole", "chunk"])
def test_flash_with_sinks_is_the_formula(window: int | None, fewer_queries: bool) -> None:
    lengths_k = [300, 1, 517]
    lengths_q = [100, 1, 200] if fewer_queries else lengths_k
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((sum(lengths_q), 8, 64), (sum(lengths_k), 2, 64), (sum(lengths_k), 2, 64), (8,))
    leaves = [torch.randn(*shape, device="cuda", generator=generator).bfloat16() for shape in shapes]
    leaves[3] = leaves[3] * 2
    upstream = torch.randn(*shapes[0], device="cuda", generator=generator)
    cu_q, cu_k = (torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in (lengths_q, lengths_k))

    def run(dtype: torch.dtype, is_flash: bool) -> list[torch.Tensor]:
        own = [leaf.to(dtype).clone().requires_grad_() for leaf in leaves]
        if is_flash:
            out = varlen_sink_attention(*own, cu_q, cu_k, max(lengths_q), max(lengths_k), scale=0.125, window=window)
        else:
            *parts, sinks = own
            out = per_sequence_attention(*parts, lengths_q, lengths_k, scale=0.125, window=window, sinks=sinks)
        (out * upstream.to(dtype)).sum().backward()
        return [out.detach().float(), *(x.grad.float() for x in own)]

    exact = run(torch.float64, False)
    flash, plain = run(torch.bfloat16, True), run(torch.bfloat16, False)
    for name, value, rounded, expected in zip("oqkvs", flash, plain, exact, strict=True):
        error, usual = ((x - expected).norm() / expected.norm() for x in (value, rounded))
        assert error < 2 * usual + 1e-3, f"{name}: {error:.1e}; plain bf16 is off by {usual:.1e}"
