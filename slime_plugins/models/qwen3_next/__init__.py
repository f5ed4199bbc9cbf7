"""Qwen3-Next: three of four layers are gated delta nets, every fourth is attention with an output gate.

layers.py            the layers: our decoder block with some self-attentions replaced
gated_delta_net.py   linear attention by the gated delta rule, in every parallel layout
delta_rule.py        the rule itself, chunk by chunk in plain torch, or by the kernels of ``fla``
packed_rows.py       where the tokens of packed sequences lie in chunks and in the convolution's input
head_exchange.py     context parallelism: all tokens of some heads instead of some tokens of all heads
"""

from slime_plugins.models.qwen3_next.layers import check_stages, get_qwen3_next_spec

__all__ = ["check_stages", "get_qwen3_next_spec"]
