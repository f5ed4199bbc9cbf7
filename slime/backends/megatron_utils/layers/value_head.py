"""The critic's output layer: one value per token, in place of the actor's vocabulary projection.

An actor's checkpoint has no such layer: its ``output_layer.weight`` is [vocabulary, hidden] or missing.  A critic that
starts from one loads everything else and initializes this layer randomly, equally in every parallel layout.
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
"""Standard deviation of the initial weights without ``--init-method-std``."""

HEAD_NAMES = ("output_layer.weight", "output_layer.bias")
"""Names of the layer's parameters, in the model and on disk."""


class ValueHead(torch.nn.Linear):
    """Linear layer hidden -> 1 with bias, in fp32 whatever the model's precision; replicated over tensor ranks."""

    def __init__(self, config: TransformerConfig, seed: int) -> None:
        self._std = config.init_method_std or DEFAULT_STD
        self._seed = seed
        super().__init__(config.hidden_size, 1, bias=True, **cpu_platform.of_new_parameters(config))
        self.sequence_parallel = config.sequence_parallel
        for parameter in self.parameters():
            # megatron-core then sums these gradients over the tensor ranks, each of which has a part of the tokens.
            vars(parameter).update(sequence_parallel=config.sequence_parallel, is_value_head=True)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weights from N(0, std) with a separate generator, equally on all ranks and in all layouts; bias 0."""
        generator = torch.Generator().manual_seed(self._seed)
        self.weight.copy_(torch.empty(self.weight.shape).normal_(0.0, self._std, generator=generator))
        self.bias.zero_()

    def forward(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: Any = None) -> Any:
        """Map [t, 1, hidden] to fp32 [t, 1, 1]; also return None for the bias, as megatron-core's linear layers do."""
        # Rounding a value to bf16 would change it by up to 0.4%, and advantages are differences of values.
        values = F.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            # Every tensor rank computes the same loss from the gathered values, so its gradient is split, not summed.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def is_of_value_head(parameter: Any) -> bool:
    """Return True if a parameter belongs to a critic's output layer."""
    return getattr(parameter, "is_value_head", False)


def find_value_head(model: Sequence[torch.nn.Module]) -> ValueHead | None:
    """Return the critic's output layer, which only the last pipeline stage of a critic has; otherwise None."""
    for chunk in unwrap_model(list(model)):
        head = getattr(chunk, "output_layer", None)
        if isinstance(head, ValueHead):
            return head
    return None


def take_out_unsaved_head(
    model: Sequence[torch.nn.Module], model_state: Mapping[str, dict[str, Any]], saved: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Initialize the parameters of a critic's output layer that a checkpoint does not have, and do not load them.

    Args:
        model_state: sharded state by chunk; entries are removed in place.
        saved: name on disk -> shape in the checkpoint.

    Returns:
        name -> freshly initialized tensor of each removed parameter; empty if the model is not a critic.
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
