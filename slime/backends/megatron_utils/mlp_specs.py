"""The second half of a layer: a dense MLP, or experts behind a router."""

from __future__ import annotations

from slime.backends.megatron_utils import cpu_platform, wheel_fixes  # noqa: F401

# isort: split
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.experts import StackedExperts
from slime.backends.megatron_utils.routed_layer import RoutedExperts
from slime.backends.megatron_utils.router import Router


def mlp_spec(config: TransformerConfig, *, is_moe: bool) -> ModuleSpec:
    """The MLP of one layer: dense, or routed experts with the shared experts that the config asks for."""
    provider = LocalSpecProvider()
    matrices = MLPSubmodules(linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear())
    if not is_moe:
        return ModuleSpec(module=MLP, submodules=matrices)
    return ModuleSpec(
        module=RoutedExperts,
        submodules=MoESubmodules(
            router=Router,
            experts=StackedExperts,
            # Built only with --moe-shared-expert-intermediate-size.
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=matrices),
        ),
        metainfo={"fuse_pre_mlp_layernorm": False},
    )
