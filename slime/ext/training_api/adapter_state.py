"""What a client has trained: an adapter's numbers, gradients and moments, on the host while others are in the model.

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
        values: [P] fp32, the numbers.
    """

    spec: LoraSpec
    values: Tensor
    gradient: Tensor = field(init=False)
    """[P], of this rank's data since the last step."""
    moments: dict[str, Tensor] = field(init=False)
    """Adam's, [P] each."""
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.gradient = torch.zeros_like(self.values)
        self.moments = {name: torch.zeros_like(self.values) for name in MOMENTS}

    def step(self, gradient: Tensor, adam: AdamParams) -> None:
        """Take a step of AdamW (arXiv:1711.05101) with a gradient [P], and clear the one that has added up."""
        parameter = torch.nn.Parameter(self.values)
        parameter.grad = gradient
        optimizer = torch.optim.AdamW(
            [parameter],
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            foreach=False,
        )
        optimizer.state[parameter] = {"step": torch.tensor(float(self.num_steps)), **self.moments}
        optimizer.step()
        self.num_steps += 1
        self.gradient.zero_()

    def restart(self) -> None:
        """Begin Adam again, and drop the gradient."""
        self.num_steps = 0
        for tensor in (self.gradient, *self.moments.values()):
            tensor.zero_()


def trains(spec: LoraSpec, name: str) -> bool:
    """Return whether an adapter is trained on the module of a parameter, by its name in the model."""
    return spec.train_attn if ".self_attention." in name else spec.train_mlp


def parts_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the views of a vector that belong to the parameters, in their shapes."""
    parts = flat.split_with_sizes([parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]
