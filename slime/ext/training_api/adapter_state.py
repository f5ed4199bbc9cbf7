"""What a client has trained: an adapter's numbers, gradients and moments, on the host or on the device.

Numbers are fp32 in one vector per rank of the trainer, parameters one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime.ext.training_api.backend import AdamParams, LoraSpec

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class AdapterState:
    """One client's adapter on this rank.

    Args:
        spec: of the adapter.
        values: [P] fp32, the numbers; the other vectors are where these are.
    """

    spec: LoraSpec
    values: Tensor
    gradient: Tensor = field(init=False)
    """[P], of this rank's data since the last step, where there were any."""
    has_gradient: bool = False
    moments: dict[str, Tensor] = field(init=False)
    """Adam's, [P] each."""
    num_steps: int = 0

    def __post_init__(self) -> None:
        def zeros() -> Tensor:
            return torch.zeros_like(self.values, pin_memory=self.values.is_pinned())

        self.gradient = zeros()
        self.moments = {name: zeros() for name in MOMENTS}

    def add_gradient(self, gradient: Tensor) -> None:
        """Add a gradient [P], of any device."""
        self.gradient.copy_(self.gradient.to(gradient.device) + gradient if self.has_gradient else gradient)
        self.has_gradient = True

    def gradient_on(self, device: torch.device) -> Tensor:
        """Return a copy of what has added up, zeros where nothing has."""
        return self.gradient.to(device, copy=True) if self.has_gradient else torch.zeros_like(self.values).to(device)

    def step(self, gradient: Tensor, adam: AdamParams) -> None:
        """Take a step of AdamW (arXiv:1711.05101) on the device of a gradient [P], and drop the one that added up."""
        device = gradient.device
        parameter = torch.nn.Parameter(self.values.to(device))
        moments = {name: moment.to(device) for name, moment in self.moments.items()}
        parameter.grad = gradient
        optimizer = torch.optim.AdamW(
            [parameter],
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            foreach=False,
            fused=device.type == "cuda",
        )
        num_steps = torch.tensor(float(self.num_steps), device=device)
        optimizer.state[parameter] = {"step": num_steps, **moments}
        optimizer.step()
        self.values.copy_(parameter.detach())
        for name, moment in moments.items():
            self.moments[name].copy_(moment)
        self.num_steps += 1
        self.has_gradient = False

    def restart(self) -> None:
        """Begin Adam again, and drop the gradient."""
        self.num_steps, self.has_gradient = 0, False
        for moment in self.moments.values():
            moment.zero_()


def trains(spec: LoraSpec, name: str) -> bool:
    """Return whether an adapter is trained on the module of a parameter, by its name in the model."""
    return spec.train_attn if ".self_attention." in name else spec.train_mlp


def parts_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the views of a vector that belong to the parameters, in their shapes."""
    parts = flat.split_with_sizes([parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]
