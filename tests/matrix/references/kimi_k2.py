"""Kimi-K2, plain and slow: DeepSeek-V2's attention, DeepSeek-V3's experts, YaRN, written from their papers.

transformers has no class for it.  A test compares this module with transformers' DeepSeek-V3 on equal weights.
Positions are rotated as complex numbers, attention uses a full mask, experts run one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.matrix.case import read_config, read_tensors

LATENT_EPSILON = 1e-6
Config = Mapping[str, Any]


class RootMeanSquareNorm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.epsilon).sqrt()


def angles(config: Config, length: int) -> Tensor:
    """Radians [length, rope / 2] of each position and each pair of dimensions."""
    width, base = config["qk_rope_head_dim"], config["rope_theta"]
    yarn = config["rope_scaling"]
    rates = []
    low, high = (
        width * math.log(yarn["original_max_position_embeddings"] / (beta * 2 * math.pi)) / (2 * math.log(base))
        for beta in (yarn["beta_fast"], yarn["beta_slow"])
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
    for pair in range(width // 2):
        rate = base ** (-2 * pair / width)
        stretched = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
        rates.append(stretched * rate / yarn["factor"] + (1 - stretched) * rate)
    return torch.arange(length)[:, None] * torch.tensor(rates)


def magnitude(config: Config, name: str) -> float:
    """YaRN's correction of the entropy of attention."""
    yarn = config["rope_scaling"]
    return 0.1 * yarn[name] * math.log(yarn["factor"]) + 1.0


def turn(x: Tensor, radians: Tensor, strength: float) -> Tensor:
    """Neighboring dimensions [..., L, rope] as complex numbers, rotated."""
    numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * torch.polar(torch.full_like(radians, strength), radians)).flatten(-2)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.heads = config["num_attention_heads"]
        self.plain, self.rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        hidden, query_rank, rank = config["hidden_size"], config["q_lora_rank"], config["kv_lora_rank"]
        self.q_a_proj = nn.Linear(hidden, query_rank, bias=False)
        self.q_a_layernorm = RootMeanSquareNorm(query_rank, LATENT_EPSILON)
        self.q_b_proj = nn.Linear(query_rank, self.heads * (self.plain + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, rank + self.rope, bias=False)
        self.kv_a_layernorm = RootMeanSquareNorm(rank, LATENT_EPSILON)
        self.kv_b_proj = nn.Linear(rank, self.heads * (self.plain + config["v_head_dim"]), bias=False)
        self.o_proj = nn.Linear(self.heads * config["v_head_dim"], hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(0)
        radians = angles(self.config, length)
        strength = magnitude(self.config, "mscale") / magnitude(self.config, "mscale_all_dim")
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(length, self.heads, -1).transpose(0, 1)
        query_plain, query_rope = query[..., : self.plain], turn(query[..., self.plain :], radians, strength)
        latent, key_rope = self.kv_a_proj_with_mqa(x).split([self.config["kv_lora_rank"], self.rope], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).view(length, self.heads, -1).transpose(0, 1)
        key_plain, value = expanded[..., : self.plain], expanded[..., self.plain :]
        logits = query_plain @ key_plain.transpose(1, 2) + query_rope @ turn(key_rope, radians, strength).T
        logits = logits * magnitude(self.config, "mscale_all_dim") ** 2 / math.sqrt(self.plain + self.rope)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        out = logits.masked_fill(future, -math.inf).softmax(-1) @ value
        return self.o_proj(out.transpose(0, 1).flatten(1))


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """Which experts a token goes to, and their weights; one expert group."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config["n_group"] == config["topk_group"] == 1 and config["norm_topk_prob"]
        self.config = config
        self.weight = nn.Parameter(torch.empty(config["n_routed_experts"], config["hidden_size"]))
        self.register_buffer("e_score_correction_bias", torch.zeros(config["n_routed_experts"]))

    def forward(self, token: Tensor) -> tuple[list[int], Tensor]:
        scores = (self.weight @ token).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.config["num_experts_per_tok"]).indices
        weights = scores[chosen] / scores[chosen].sum()
        return chosen.tolist(), weights * self.config["routed_scaling_factor"]


class Experts(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, width = config["hidden_size"], config["moe_intermediate_size"]
        self.gate = Gate(config)
        self.experts = nn.ModuleList(Mlp(hidden, width) for _ in range(config["n_routed_experts"]))
        self.shared_experts = Mlp(hidden, width * config["n_shared_experts"])

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for token in x:
            chosen, weights = self.gate(token)
            rows.append(sum(weight * self.experts[e](token) for e, weight in zip(chosen, weights, strict=True)))
        return torch.stack(rows) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        hidden, epsilon = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = RootMeanSquareNorm(hidden, epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RootMeanSquareNorm(hidden, epsilon)
        is_dense = index < config["first_k_dense_replace"]
        self.mlp = Mlp(hidden, config["intermediate_size"]) if is_dense else Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config["num_hidden_layers"]))
        self.norm = RootMeanSquareNorm(config["hidden_size"], config["rms_norm_eps"])


class KimiK2(nn.Module):
    """Ids [1, L] to logits [1, L, vocab]; parameters are named as in the checkpoint."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids[0])
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))[None]


def load(folder: Path) -> KimiK2:
    """The model of a checkpoint folder."""
    model = KimiK2(read_config(folder))
    model.load_state_dict(read_tensors(folder))
    return model
