"""Qwen3.5 with its vision tower: the layers of ``qwen3_5``, under a name that also requests the tower.

    --spec slime_plugins.models.qwen3_5_vl get_qwen3_5_vl_model_provider

``--multimodal-keys`` and ``--train-vision-tower`` also request it.
"""

from __future__ import annotations

from slime_plugins.models.qwen3_5.layers import check_stages
from slime_plugins.models.qwen3_5.layers import get_qwen3_5_spec as get_qwen3_5_vl_model_provider

__all__ = ["check_stages", "get_qwen3_5_vl_model_provider"]
