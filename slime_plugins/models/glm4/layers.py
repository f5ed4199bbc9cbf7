"""GLM-4 and GLM-Z1 (9B, 32B): norms on both sides of attention and MLP.

    --spec slime_plugins.models.glm4 get_glm_spec --post-self-attn-layernorm --post-mlp-layernorm

The two flags also work without ``--spec``; the path exists for commands that name it.
"""

from __future__ import annotations

from slime.backends.megatron_utils.layers.layer_specs import block_spec_of_flags as get_glm_spec

__all__ = ["get_glm_spec"]
