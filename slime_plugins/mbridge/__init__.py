"""Bridges between Hugging Face and Megatron weights, by the import paths that older recipes name.

The work is done by ``slime.backends.megatron_utils``: its tables of weights serve every model type.
"""

from slime_plugins.mbridge.deepseek_v32 import DeepseekV32Bridge

__all__ = ["DeepseekV32Bridge"]
