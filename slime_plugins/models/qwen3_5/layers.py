"""The layers of Qwen3.5 and Qwen3.6, text: those of Qwen3-Next, with experts or with a dense MLP.

    --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec --attention-output-gate --apply-layernorm-1p

Published folders also contain a vision tower; these are the layers of the language model.
"""

from __future__ import annotations

from slime_plugins.models.qwen3_next.layers import check_stages
from slime_plugins.models.qwen3_next.layers import get_qwen3_next_spec as get_qwen3_5_spec

__all__ = ["check_stages", "get_qwen3_5_spec"]
