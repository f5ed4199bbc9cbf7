"""Forward FLOPs of one sequence, from the dimensions of the model.

Used to balance ranks and micro-batches, and for the TFLOP/s metric.  A multiply-add counts as two.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopsModel:
    """The dimensions that the cost of a sequence depends on; sizes in elements.

    Attention is causal, so the score and value products cost half of the full square.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocab_size: int
    num_moe_layers: int = 0
    moe_active_ffn_hidden_size: int = 0
    """Width of all experts that one token visits: top-k routed ones and the shared one."""
    is_mla: bool = False
    """Multi-head latent attention; the fields below are its dimensions."""
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0
    has_output_gate: bool = False
    """The query projection gives a gate of the same width too."""
    num_linear_layers: int = 0
    """Layers with linear attention (gated delta nets); the fields below are its dimensions."""
    linear_channels: int = 0
    """Queries, keys and values of one token."""
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0

    @classmethod
    def from_args(cls, namespace: Namespace) -> FlopsModel:
        """The dimensions under their Megatron flag names; those that a model family lacks may be absent."""
        dims = vars(namespace)
        num_layers = dims["num_layers"]
        heads = dims["num_attention_heads"]
        num_moe_layers = 0
        moe_width = 0
        if dims.get("num_experts"):
            pattern = dims.get("moe_layer_freq", 1)
            if isinstance(pattern, int):
                pattern = [int(layer % pattern == 0) for layer in range(num_layers)]
            num_moe_layers = sum(pattern)
            moe_width = (dims.get("moe_ffn_hidden_size") or dims["ffn_hidden_size"]) * dims["moe_router_topk"]
            moe_width += dims.get("moe_shared_expert_intermediate_size") or 0
        return cls(
            num_layers=num_layers,
            hidden_size=dims["hidden_size"],
            num_attention_heads=heads,
            num_query_groups=dims.get("num_query_groups") or heads,
            kv_channels=dims.get("kv_channels") or dims["hidden_size"] // heads,
            ffn_hidden_size=dims["ffn_hidden_size"],
            vocab_size=dims["vocab_size"],
            num_moe_layers=num_moe_layers,
            moe_active_ffn_hidden_size=moe_width,
            is_mla=bool(dims.get("multi_latent_attention")),
            q_lora_rank=dims.get("q_lora_rank"),
            kv_lora_rank=dims.get("kv_lora_rank") or 0,
            qk_head_dim=dims.get("qk_head_dim") or 0,
            qk_pos_emb_head_dim=dims.get("qk_pos_emb_head_dim") or 0,
            v_head_dim=dims.get("v_head_dim") or 0,
            has_output_gate=bool(dims.get("attention_output_gate")),
            **_linear_dimensions(dims),
        )

    def forward_flops(self, length: int) -> int:
        """FLOPs of one forward pass over a sequence of ``length`` tokens; training costs three times as many."""
        attention = self._mla_flops(length) if self.is_mla else self._attention_flops(length)
        attention *= self.num_layers - self.num_linear_layers
        attention += self.num_linear_layers * self._linear_flops(length)
        num_dense_layers = self.num_layers - self.num_moe_layers
        mlp_width = num_dense_layers * self.ffn_hidden_size + self.num_moe_layers * self.moe_active_ffn_hidden_size
        mlp = 6 * length * self.hidden_size * mlp_width
        head = 2 * length * self.hidden_size * self.vocab_size
        return attention + mlp + head

    def _attention_flops(self, length: int) -> int:
        query_width = self.num_attention_heads * self.kv_channels
        key_width = self.num_query_groups * self.kv_channels
        projections = 2 * length * self.hidden_size * (query_width * (1 + self.has_output_gate) + 2 * key_width)
        output = 2 * length * query_width * self.hidden_size
        scores_and_values = 2 * length * length * query_width
        return projections + scores_and_values + output

    def _mla_flops(self, length: int) -> int:
        heads, hidden = self.num_attention_heads, self.hidden_size
        qk_width = self.qk_head_dim + self.qk_pos_emb_head_dim
        if self.q_lora_rank:
            query = 2 * length * self.q_lora_rank * (hidden + heads * qk_width)
        else:
            query = 2 * length * hidden * heads * qk_width
        key_value = self.kv_lora_rank * (hidden + heads * (self.qk_head_dim + self.v_head_dim))
        key_value = 2 * length * (key_value + hidden * self.qk_pos_emb_head_dim)
        scores_and_values = heads * length * length * (qk_width + self.v_head_dim)
        output = 2 * length * heads * self.v_head_dim * hidden
        return query + key_value + scores_and_values + output

    def _linear_flops(self, length: int) -> int:
        """A gated delta net: per token and value head the state is read twice and written once; no square."""
        values = self.linear_value_heads * self.linear_value_dim
        projections = 2 * length * self.hidden_size * (self.linear_channels + 2 * values + 2 * self.linear_value_heads)
        return projections + 6 * length * values * self.linear_key_dim


def _linear_dimensions(dims: dict[str, Any]) -> dict[str, int]:
    """The fields of linear attention; none for a model without it."""
    pattern = dims.get("linear_attention_freq")
    if not pattern:
        return {}
    if isinstance(pattern, int):
        pattern = [int((layer + 1) % pattern != 0) for layer in range(dims["num_layers"])]
    key_width = dims["linear_num_key_heads"] * dims["linear_key_head_dim"]
    return {
        "num_linear_layers": sum(map(bool, pattern)),
        "linear_channels": 2 * key_width + dims["linear_num_value_heads"] * dims["linear_value_head_dim"],
        "linear_value_heads": dims["linear_num_value_heads"],
        "linear_key_dim": dims["linear_key_head_dim"],
        "linear_value_dim": dims["linear_value_head_dim"],
    }
