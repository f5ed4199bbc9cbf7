"""The second half of a layer: a dense MLP, or experts behind a router."""

from __future__ import annotations

from slime.backends.megatron_utils import cpu_platform, wheel_fixes  # noqa: F401

# isort: split
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from slime.backends.megatron_utils.layers.routed_layer import RoutedExperts


def mlp_spec(*, is_moe: bool) -> ModuleSpec | type[RoutedExperts]:
    """The MLP of one layer: dense, or experts, with the shared experts that the config asks for."""
    if is_moe:
        return RoutedExperts
    matrices = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(module=MLP, submodules=matrices)
