"""The second half of a layer: a dense MLP, or experts behind a router."""

from __future__ import annotations

from slime.backends.megatron_utils import cpu_platform, wheel_fixes  # noqa: F401

# isort: split
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


def mlp_spec(config: TransformerConfig, *, is_moe: bool) -> ModuleSpec:
    """The MLP of one layer, with experts or without."""
    return get_mlp_module_spec_for_backend(
        LocalSpecProvider(),
        num_experts=config.num_moe_experts if is_moe else None,
        # Without TransformerEngine the grouped experts of megatron-core need another package: one expert at a time.
        moe_grouped_gemm=False,
    )
