"""A layer and its experts that pass on to the router what it must know about the micro-batch.

megatron-core tells attention how the tokens of a micro-batch are packed, but not the router.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from slime.backends.megatron_utils.layers.experts import StackedExperts
from slime.backends.megatron_utils.layers.router import Router, RouterInputs
from slime.backends.megatron_utils.layers.token_dispatcher import GatherDispatcher


class RoutedLayer(TransformerLayer):
    """TransformerLayer that hands the router's inputs to its experts, in place of megatron-core's padding mask."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run as the parent does; ``packed_seq_params`` may carry samples and the experts to choose."""
        kwargs["padding_mask"] = RouterInputs.of(kwargs.get("packed_seq_params"))
        return super().forward(*args, **kwargs)


class RoutedExperts(MoELayer):
    """MoELayer that gives its router the inputs of the pass at hand, with a token dispatcher of our own.

    Passes of several micro-batches interleave, and a recomputed pass comes back later: so the inputs belong to the
    pass, not to the layer.
    """

    moe_layer_recompute: bool

    def __init__(self, config: TransformerConfig, submodules: MoESubmodules | None = None, **kwargs: Any) -> None:
        """Build with ``submodules`` in place of our router and experts; the config says whether there are shared
        experts.
        """
        super().__init__(config, submodules or _parts(), **kwargs)
        # Recomputed here, with the inputs that the pass had.
        self.recomputes, self.moe_layer_recompute = self.moe_layer_recompute, False
        if GatherDispatcher.serves(self.config):
            self.token_dispatcher = GatherDispatcher(self.num_local_experts, self.config, get_default_pg_collection())

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: RouterInputs | None = None
    ) -> Any:
        """Map [t, 1, hidden] to [t, 1, hidden], and the None that stands for a bias."""
        run = partial(self._run, padding_mask or RouterInputs())
        if self.recomputes:
            return tensor_parallel.checkpoint(run, False, hidden_states)
        return run(hidden_states)

    def _run(self, inputs: RouterInputs, hidden_states: Tensor) -> Any:
        if isinstance(self.router, Router):
            self.router.take(inputs)
        return super().forward(hidden_states)


def _parts() -> MoESubmodules:
    matrices = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return MoESubmodules(
        router=Router,
        experts=StackedExperts,
        shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=matrices),
    )
