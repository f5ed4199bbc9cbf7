"""Adam with moments in bf16 and fp16, against ``torch.optim.AdamW`` and values by hand."""

from __future__ import annotations

import pytest
import torch

from slime.ext.small_adam.adam import BLOCK, LowPrecisionAdam, StatelessAdam

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GROUP = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def adam(parameter: torch.Tensor, first: torch.dtype, second: torch.dtype, **changes: object) -> LowPrecisionAdam:
    return LowPrecisionAdam([{"params": [parameter]} | GROUP | changes], {"exp_avg": first, "exp_avg_sq": second})


def torch_adam(parameter: torch.Tensor) -> torch.optim.AdamW:
    return torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)


def weights(size: int = 5 * BLOCK + 7) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def gradients(steps: int, size: int = 5 * BLOCK + 7, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [scale * torch.randn(size, generator=generator) for _ in range(steps)]


def train(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, steps: list[torch.Tensor]) -> torch.Tensor:
    for gradient in steps:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter


def test_with_fp32_moments_it_is_torchs_adamw() -> None:
    expected, found = weights(), weights()
    train(torch_adam(expected), expected, gradients(20))
    train(adam(found, FP32, FP32), found, gradients(20))
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("first", "second"), [(BF16, BF16), (FP16, FP16), (BF16, FP32), (FP32, FP16)])
@pytest.mark.parametrize("scale", [1.0, 1e-7])
def test_narrow_moments_move_weights_as_fp32_ones_do(first: torch.dtype, second: torch.dtype, scale: float) -> None:
    """Also with gradients of 1e-7, whose squares are below the range of fp16."""
    start, expected, found = weights(), weights(), weights()
    train(torch_adam(expected), expected, gradients(50, scale=scale))
    train(adam(found, first, second), found, gradients(50, scale=scale))
    assert (found - expected).norm() < 0.02 * (expected - start).norm()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_second_moment_goes_on_growing_by_a_thousandth_a_step(dtype: torch.dtype) -> None:
    """v after 2,000 steps of g = 1 is 1 - 0.999 ** 2000 = 0.8648; rounded to nearest, bf16 stops at 0.25."""
    parameter = torch.zeros(4 * BLOCK)
    optimizer = adam(parameter, dtype, dtype, lr=0.0)
    nearest = torch.zeros((), dtype=dtype)
    for _ in range(2000):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        nearest = (nearest.float() * 0.999 + 0.001).to(dtype)
    assert optimizer.moment(parameter, "exp_avg_sq").mean() == pytest.approx(1 - 0.999**2000, rel=5e-3)
    if dtype == BF16:
        assert nearest < 0.5


def test_rounding_is_unbiased_and_between_the_two_neighbours() -> None:
    """g = 1.003 gives m = 0.1003; bf16 has 0.10009765625 and 0.1005859375 around it."""
    parameter = torch.zeros(64 * BLOCK)
    optimizer = adam(parameter, BF16, BF16)
    train(optimizer, parameter, [torch.full_like(parameter, 1.003)])
    kept = optimizer.moment(parameter, "exp_avg")
    assert set(kept.tolist()) == {0.10009765625, 0.1005859375}
    assert kept.mean() == pytest.approx(0.1003, rel=1e-4)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_resumed_run_takes_the_same_steps(dtype: torch.dtype) -> None:
    steps = gradients(6)
    whole = weights()
    train(adam(whole, dtype, dtype), whole, steps)
    half = weights()
    first = adam(half, dtype, dtype)
    train(first, half, steps[:3])
    resumed = half.clone()
    second = adam(resumed, dtype, dtype)
    for name in ("exp_avg", "exp_avg_sq"):
        second.set_moment(resumed, name, first.moment(half, name))
    second.initialize(resumed)["step"].fill_(3)
    train(second, resumed, steps[3:])
    if dtype == BF16:
        assert torch.equal(resumed, whole)
    else:  # a block whose largest moment was rounded up to a power of two has another scale
        assert torch.allclose(resumed, whole, rtol=1e-3, atol=1e-4)


def test_a_stateless_adam_asked_for_a_moment_names_itself_and_the_flag():
    parameter = torch.zeros(4)
    adam = StatelessAdam([{"params": [parameter], "lr": 1.0}])
    says = "StatelessAdam keeps no exp_avg_sq .*--no-save-optim"
    with pytest.raises(NotImplementedError, match=says):
        adam.moment(parameter, "exp_avg_sq")
    with pytest.raises(NotImplementedError, match=says):
        adam.set_moment(parameter, "exp_avg_sq", parameter)
