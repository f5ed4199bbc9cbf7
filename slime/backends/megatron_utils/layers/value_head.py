"""The critic's output layer: one number a token where the actor has the vocabulary projection.

A checkpoint of an actor has no such layer: its ``output_layer.weight`` is [vocabulary, hidden] or missing.  A critic
that starts from one keeps everything else of it and draws this layer, the same in every layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform

DEFAULT_STD = 0.02
"""Deviation of the first weights where ``--init-method-std`` does not say."""

HEAD_NAMES = ("output_layer.weight", "output_layer.bias")
"""Of the layer's parameters, in the model and on disk."""


class ValueHead(torch.nn.Linear):
    """hidden -> 1 with a bias, in fp32 whatever the model's precision; every tensor-parallel rank holds all of it."""

    def __init__(self, config: TransformerConfig, seed: int) -> None:
        self._std = config.init_method_std or DEFAULT_STD
        self._seed = seed
        super().__init__(config.hidden_size, 1, bias=True, **cpu_platform.of_new_parameters(config))
        self.sequence_parallel = config.sequence_parallel
        for parameter in self.parameters():
            # megatron-core sums such gradients over the tensor ranks, each of which has a part of the tokens.
            vars(parameter).update(sequence_parallel=config.sequence_parallel, is_value_head=True)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weights from N(0, std), bias 0, by a separate generator, so that neither rank nor layout matters."""
        generator = torch.Generator().manual_seed(self._seed)
        self.weight.copy_(torch.empty(self.weight.shape).normal_(0.0, self._std, generator=generator))
        self.bias.zero_()

    def forward(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: Any = None) -> Any:
        """Map [t, 1, hidden] to fp32 [t, 1, 1], with the None that megatron-core's linear layers return as bias."""
        # A value rounded to bf16 would be off by up to 0.4%, and every advantage is a difference of values.
        values = F.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            # Every tensor rank computes the same loss from the gathered values: its gradient is split, not summed.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def is_of_value_head(parameter: Any) -> bool:
    """Return True when a parameter belongs to a critic's output layer."""
    return getattr(parameter, "is_value_head", False)


def find_value_head(model: Sequence[torch.nn.Module]) -> ValueHead | None:
    """Find the critic's output layer among this rank's chunks; the last pipeline stage of a critic has one."""
    for chunk in unwrap_model(list(model)):
        head = getattr(chunk, "output_layer", None)
        if isinstance(head, ValueHead):
            return head
    return None


def take_out_unsaved_head(
    model: Sequence[torch.nn.Module], model_state: Mapping[str, dict[str, Any]], saved: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Draw what a checkpoint does not have of a critic's output layer, and take it out of what is to be loaded.

    Args:
        model_state: sharded state by chunk; entries are removed.
        saved: name on disk -> shape in the checkpoint.

    Returns:
        name -> fresh tensor of every parameter that was taken out; empty for anything but a critic.
    """
    head = find_value_head(model)
    if head is None:
        return {}
    parameters = dict(zip(HEAD_NAMES, (head.weight, head.bias), strict=True))
    unsaved = {name for name, parameter in parameters.items() if saved.get(name) != tuple(parameter.shape)}
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items() if name not in unsaved}
    head.reset_parameters()
    for name, value in kept.items():
        parameters[name].data.copy_(value)
    for state in model_state.values():
        for name in unsaved:
            state.pop(name, None)
    return {name: parameters[name].detach() for name in unsaved}
