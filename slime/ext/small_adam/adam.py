"""Forms of Adam that hold less than two fp32 moments of every parameter.

``--use-stateless-adam``: every step is the first one.  After one step from zero moments, bias correction gives back
the gradient and its square, so the betas have no effect, and nothing is kept from step to step:

    m = (1 - beta1) g / (1 - beta1) = g,    v = (1 - beta2) g^2 / (1 - beta2) = g^2
    p <- (1 - lr * weight_decay) p - lr * g / (|g| + eps)

``--use-precision-aware-optimizer`` with ``--exp-avg-dtype`` and ``--exp-avg-sq-dtype``: the moments are kept in bf16
or fp16, and a step computes in fp32 from what is kept.

Adam: arXiv:1412.6980, algorithm 1; decoupled weight decay: arXiv:1711.05101; stochastic rounding of low-precision
state: arXiv:1502.02551; block-wise scales: arXiv:2110.02861.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.adam import MOMENTS, OwnAdam, replace_adam
from slime.backends.megatron_utils.model_transform import ModelTransform

BLOCK = 1024
"""Elements that share the scale of an fp16 moment."""
_CHUNK = 4096 * BLOCK
"""Elements of a parameter that a step of plain torch takes at once: it makes fp32 copies of them."""
_FP16_LARGEST = 32768.0
"""Magnitude of the largest element of a block in fp16: half of fp16's range, for rounding up."""
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Mantissa bits that fp32 has and the dtype has not."""


class StatelessAdam(OwnAdam):
    """The step of ``torch.optim.AdamW`` from zero moments; ``state`` stays empty."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's closures have no place here
        """Update every parameter that has a gradient; beside it there is one tensor of its size at a time."""
        assert closure is None, "a closure would be called without gradients"
        for group in self.param_groups:
            lr, decay, eps = group["lr"], group["weight_decay"], group["eps"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if decay:
                    parameter.mul_(1 - lr * decay)
                parameter.addcdiv_(gradient, gradient.abs().add_(eps), value=-lr)

    def initialize(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return nothing."""
        return {}


class LowPrecisionAdam(OwnAdam):
    """``torch.optim.AdamW`` with moments in bf16 or fp16.

    A step reads the moments as fp32, updates them and the parameter in fp32, and stores them with stochastic rounding:
    with beta2 = 0.999 a step changes the second moment by a thousandth, less than half a unit of bf16, so rounding to
    the nearest would never move it.  fp16 moments have one fp32 scale per :data:`BLOCK` elements, since the squares of
    usual gradients lie below fp16's range.  The noise depends on the step and the parameter's place alone, so a
    resumed run draws the same.

    Args:
        param_groups: each with ``lr``, ``betas``, ``eps`` and ``weight_decay``; their parameters are fp32, flat and
            contiguous.
        dtypes: of ``exp_avg`` and ``exp_avg_sq``: fp32, bf16 or fp16.
    """

    def __init__(self, param_groups: list[dict[str, Any]], dtypes: dict[str, torch.dtype]) -> None:
        super().__init__(param_groups)
        self._dtypes = dtypes

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "a closure would be called without gradients"
        place = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                place += 1
                if parameter.grad is None:
                    continue
                state = self.initialize(parameter)
                state["step"] += 1
                numbers = _step_numbers(group, float(state["step"]))
                seed = place << 32 | int(state["step"])
                if parameter.is_cuda:
                    from slime.ext.small_adam.adam_kernel import launch_step

                    launch_step(parameter, parameter.grad, state, numbers, seed, BLOCK)
                else:
                    _step_in_torch(parameter, parameter.grad, state, numbers, seed)

    def initialize(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter; moments are zero before its first step."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in MOMENTS:
                dtype = self._dtypes[name]
                state[name] = torch.zeros_like(parameter, dtype=dtype)
                if dtype == torch.float16:
                    blocks = -(-parameter.numel() // BLOCK)
                    state[_scale_of(name)] = torch.ones(blocks, dtype=torch.float32, device=parameter.device)
        return state

    def moment(self, parameter: Tensor, name: str) -> Tensor:
        """Return a moment in fp32 [elements of the parameter]."""
        state = self.initialize(parameter)
        return _load(state, name, slice(0, parameter.numel()))

    def set_moment(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Store a moment from fp32 [elements of the parameter]; rounded to the nearest."""
        state = self.initialize(parameter)
        _store(state, name, slice(0, parameter.numel()), value.to(parameter.device), noise=None)


def _step_numbers(group: dict[str, Any], step: float) -> dict[str, float]:
    """Return the scalars of ``p <- keep p - rate m / (sqrt(v) / root + eps)``."""
    beta1, beta2 = group["betas"]
    return {
        # Subtracted here in double: in fp32, 1 - 0.999 is off by 1.3e-5 of itself.
        "share1": 1 - beta1,
        "share2": 1 - beta2,
        "beta2": beta2,
        "keep": 1 - group["lr"] * group["weight_decay"],
        "rate": group["lr"] / (1 - beta1**step),
        "root": (1 - beta2**step) ** 0.5,
        "eps": group["eps"],
    }


def _step_in_torch(
    parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], numbers: dict[str, float], seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    parameter, gradient = parameter.view(-1), gradient.view(-1)
    for start in range(0, parameter.numel(), _CHUNK):
        part = slice(start, min(start + _CHUNK, parameter.numel()))
        grad = gradient[part].float()
        first = _load(state, "exp_avg", part).lerp_(grad, numbers["share1"])
        second = _load(state, "exp_avg_sq", part).mul_(numbers["beta2"])
        second.addcmul_(grad, grad, value=numbers["share2"])
        denominator = second.sqrt().div_(numbers["root"]).add_(numbers["eps"])
        parameter[part].mul_(numbers["keep"]).addcdiv_(first, denominator, value=-numbers["rate"])
        _store(state, "exp_avg", part, first, noise)
        _store(state, "exp_avg_sq", part, second, noise)


def _scale_of(name: str) -> str:
    return f"{name}_scale"


def _load(state: dict[str, Tensor], name: str, part: slice) -> Tensor:
    """Return a copy in fp32 of part of a moment; the part begins at a block."""
    kept = state[name].view(-1)[part]
    if kept.dtype != torch.float16:
        return kept.to(torch.float32, copy=True)
    return kept.float().mul_(_scales(state, name, part).repeat_interleave(BLOCK)[: kept.numel()])


def _scales(state: dict[str, Tensor], name: str, part: slice) -> Tensor:
    return state[_scale_of(name)][part.start // BLOCK : -(-part.stop // BLOCK)]


def _store(state: dict[str, Tensor], name: str, part: slice, value: Tensor, noise: torch.Generator | None) -> None:
    """Store part of a moment; without noise it is rounded to the nearest."""
    kept = state[name].view(-1)[part]
    value = value.reshape(-1).float()
    if kept.dtype == torch.float16:
        padded = torch.nn.functional.pad(value, (0, -value.numel() % BLOCK)).view(-1, BLOCK)
        scales = _power_of_two(padded.abs().amax(1) / _FP16_LARGEST)
        _scales(state, name, part).copy_(scales)
        value = (padded / scales[:, None]).view(-1)[: value.numel()]
    if noise is not None and kept.dtype in _DROPPED_BITS:
        bits = _DROPPED_BITS[kept.dtype]
        added = torch.randint(1 << bits, value.shape, generator=noise, dtype=torch.int32)
        value = value.view(torch.int32).add(added).bitwise_and_(-(1 << bits)).view(torch.float32)
    kept.copy_(value)


def _power_of_two(x: Tensor) -> Tensor:
    """Return the next power of two, 1 for 0: dividing by it and multiplying again loses nothing."""
    _, exponent = torch.frexp(x)
    return torch.where(x > 2.0**-100, torch.ldexp(torch.ones_like(x), exponent), torch.ones_like(x))


class Stateless(ModelTransform):
    """``--use-stateless-adam``."""

    def after_optimizer(self, optimizer: Any) -> None:
        """Have the optimizer keep nothing from step to step."""
        replace_adam(optimizer, StatelessAdam)


class NarrowMoments(ModelTransform):
    """``--use-precision-aware-optimizer`` with moments below fp32."""

    def after_optimizer(self, optimizer: Any) -> None:
        """Have the optimizer keep its moments in the dtypes of the flags."""
        dtypes = {"exp_avg": self.args.exp_avg_dtype, "exp_avg_sq": self.args.exp_avg_sq_dtype}
        replace_adam(optimizer, partial(LowPrecisionAdam, dtypes=dtypes))
