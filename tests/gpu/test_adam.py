"""Adam's fused step with narrow moments, against the same step in plain torch on the host."""

from __future__ import annotations

import pytest
import torch

from slime.ext.small_adam.adam import BLOCK, LowPrecisionAdam

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def train(device: str, dtypes: tuple[torch.dtype, torch.dtype], scale: float, steps: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    parameter = torch.randn(37 * BLOCK + 11, generator=generator).to(device)
    group = {"params": [parameter], "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = LowPrecisionAdam([group], dict(zip(("exp_avg", "exp_avg_sq"), dtypes, strict=True)))
    for _ in range(steps):
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(device)
        optimizer.step()
    moments = (optimizer.moment(parameter, name).cpu() for name in ("exp_avg", "exp_avg_sq"))
    return (parameter.cpu(), *moments)


@pytest.mark.parametrize("scale", [1.0, 1e-7])
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP16)])
def test_a_first_step_has_the_hosts_numbers(dtypes: tuple[torch.dtype, torch.dtype], scale: float) -> None:
    """Parameters agree to rounding, moments to one unit of their dtype, because the two draw different noise."""
    found, expected = train("cuda", dtypes, scale, 1), train("cpu", dtypes, scale, 1)
    assert torch.allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    unit = {FP32: 1e-6, BF16: 2.0**-7, FP16: 2.0**-10}
    for moment, on_host, dtype in zip(found[1:], expected[1:], dtypes, strict=True):
        largest = on_host.view(-1)[: 37 * BLOCK].view(37, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
        least = largest * 2.0**-24 if dtype == FP16 else 0 * largest
        error = (moment - on_host)[: 37 * BLOCK].abs()
        assert (error <= unit[dtype] * on_host[: 37 * BLOCK].abs() + 2 * least + 1e-30).all()
        assert moment.mean().item() == pytest.approx(on_host.mean().item(), rel=1e-2, abs=1e-3 * scale)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_many_steps_stay_near_those_of_fp32(dtype: torch.dtype) -> None:
    start = train("cpu", (FP32, FP32), 1.0, 0)[0]
    expected, found = train("cuda", (FP32, FP32), 1.0, 50)[0], train("cuda", (dtype, dtype), 1.0, 50)[0]
    assert (found - expected).norm() < 0.02 * (expected - start).norm()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_second_moment_goes_on_growing(dtype: torch.dtype) -> None:
    parameter = torch.zeros(4 * BLOCK, device="cuda")
    group = {"params": [parameter], "lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = LowPrecisionAdam([group], {"exp_avg": dtype, "exp_avg_sq": dtype})
    for _ in range(2000):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert optimizer.moment(parameter, "exp_avg_sq").mean().item() == pytest.approx(1 - 0.999**2000, rel=5e-3)
