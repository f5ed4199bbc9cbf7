"""The dimensions of a model that decide how much memory, work and traffic it makes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slime.backends.megatron_utils.flags.linear_arguments import linear_layers

AttentionKind = Literal["grouped", "latent", "sparse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes in elements; of the whole model, before any parallelism cuts it."""

    num_layers: int
    hidden: int
    ffn: int
    vocab: int
    """Rows of the embedding, padding for tensor parallelism included."""
    is_tied: bool
    """The vocabulary projection is the embedding."""
    is_gated: bool = True
    """The MLP has a gate beside its up projection (SwiGLU)."""
    has_bias: bool = False
    """Biases in all projections."""
    has_centered_norms: bool = False
    """Norms compute ``1 + weight`` in fp32 (``--apply-layernorm-1p``)."""
    norm_params: int = 1
    """Vectors of a norm: 1 for RMSNorm, 2 for LayerNorm."""
    post_norms: int = 0
    """Norms behind attention and MLP (GLM-4), 0 to 2."""
    learned_positions: int = 0
    """Rows of a learned position embedding."""

    attention: AttentionKind = "grouped"
    heads: int
    groups: int
    """Heads of keys and values; of latent attention not used."""
    head_dim: int
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_output_gate: bool = False
    """Attention's output is multiplied by a gate that comes out of the query projection (Qwen3-Next)."""
    norms_all_heads: bool = False
    """The query and key norms are over all heads together (MiniMax-M2), not head by head."""
    q_lora: int | None = None
    kv_lora: int = 0
    qk_dim: int = 0
    rope_dim: int = 0
    v_dim: int = 0

    computes_index: tuple[bool, ...] = ()
    """Sparse attention: which layers choose keys, one entry per layer."""
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int = 0

    is_linear: tuple[bool, ...] = ()
    """Which layers have linear attention, a gated delta net; one entry per layer, or none."""
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    linear_conv: int = 0
    """Tokens that its convolution sees."""

    is_moe: tuple[bool, ...]
    """Which layers have experts, one entry per layer."""
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    has_shared_gate: bool = False

    mtp_layers: int = 0
    trains_mtp: bool = False

    @property
    def query_width(self) -> int:
        """Elements of all heads' queries of one token."""
        return self.heads * (self.head_dim if self.attention == "grouped" else self.qk_dim + self.rope_dim)

    @property
    def key_width(self) -> int:
        """Elements of all groups' keys of one token (grouped attention)."""
        return self.groups * self.head_dim

    @property
    def value_width(self) -> int:
        """Elements of what the output projection of attention reads."""
        return self.heads * (self.head_dim if self.attention == "grouped" else self.v_dim)

    def has_linear_attention(self, layer: int) -> bool:
        """Of a layer from 0; the layers inside of MTP layers, behind the last, have full attention."""
        return layer < len(self.is_linear) and self.is_linear[layer]

    @property
    def linear_channels(self) -> int:
        """Elements of one token that linear attention convolves: queries, keys, values."""
        return 2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_width

    @property
    def linear_value_width(self) -> int:
        """Elements of all values, and of the output, of one token in linear attention."""
        return self.linear_value_heads * self.linear_value_dim

    @property
    def gate_factor(self) -> int:
        """Projections into the MLP's width."""
        return 2 if self.is_gated else 1

    @classmethod
    def from_args(cls, args: Namespace, hf_config: Mapping[str, Any]) -> ModelShape:
        """The shape that complete flags describe; ``hf_config`` tells which layers of sparse attention choose keys."""
        num_layers = args.num_layers
        attention: AttentionKind = "latent" if args.multi_latent_attention else "grouped"
        sparse = _index_sizes(args, hf_config) if _has_spec(args, "slime_plugins.models.glm5") else {}
        norms = [args.post_self_attn_layernorm, args.post_mlp_layernorm]
        return cls(
            num_layers=num_layers,
            hidden=args.hidden_size,
            ffn=args.ffn_hidden_size,
            vocab=args.padded_vocab_size,
            is_tied=not args.untie_embeddings_and_output_weights,
            is_gated=bool(args.swiglu),
            has_bias=bool(args.add_bias_linear),
            has_centered_norms=bool(args.apply_layernorm_1p),
            norm_params=2 if args.normalization == "LayerNorm" else 1,
            post_norms=sum(map(bool, norms)),
            learned_positions=args.max_position_embeddings
            if args.position_embedding_type == "learned_absolute"
            else 0,
            attention="sparse" if sparse else attention,
            heads=args.num_attention_heads,
            groups=args.num_query_groups,
            head_dim=args.kv_channels,
            has_qkv_bias=bool(args.add_qkv_bias),
            has_qk_norm=bool(args.qk_layernorm),
            has_output_gate=bool(args.attention_output_gate),
            norms_all_heads=_has_spec(args, "slime_plugins.models.minimax_m2"),
            q_lora=args.q_lora_rank if args.multi_latent_attention else None,
            kv_lora=args.kv_lora_rank if args.multi_latent_attention else 0,
            qk_dim=args.qk_head_dim if args.multi_latent_attention else 0,
            rope_dim=args.qk_pos_emb_head_dim if args.multi_latent_attention else 0,
            v_dim=args.v_head_dim if args.multi_latent_attention else 0,
            **sparse,
            **_linear_sizes(args),
            is_moe=_moe_pattern(args),
            experts=args.num_experts or 0,
            topk=args.moe_router_topk if args.num_experts else 0,
            expert_ffn=(args.moe_ffn_hidden_size or args.ffn_hidden_size) if args.num_experts else 0,
            shared_ffn=(args.moe_shared_expert_intermediate_size or 0) if args.num_experts else 0,
            has_shared_gate=bool(vars(args).get("moe_shared_expert_gate")),
            mtp_layers=args.mtp_num_layers or 0,
            trains_mtp=bool(args.enable_mtp_training),
        )


def _linear_sizes(args: Namespace) -> dict[str, Any]:
    """Which layers have linear attention, and its sizes, as attributes of :class:`ModelShape`."""
    if args.linear_attention_freq is None:
        return {}
    return {
        "is_linear": linear_layers(args.linear_attention_freq, args.num_layers),
        "linear_key_heads": args.linear_num_key_heads,
        "linear_value_heads": args.linear_num_value_heads,
        "linear_key_dim": args.linear_key_head_dim,
        "linear_value_dim": args.linear_value_head_dim,
        "linear_conv": args.linear_conv_kernel_dim,
    }


def _moe_pattern(args: Namespace) -> tuple[bool, ...]:
    if not args.num_experts:
        return (False,) * args.num_layers
    if isinstance(args.moe_layer_freq, int):
        return tuple(layer % args.moe_layer_freq == 0 for layer in range(args.num_layers))
    return tuple(bool(entry) for entry in args.moe_layer_freq)


def _has_spec(args: Namespace, package: str) -> bool:
    return bool(args.spec) and args.spec[0].startswith(package)


def _index_sizes(args: Namespace, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of the indexer, and which layers have one, as attributes of :class:`ModelShape`."""
    return {
        "computes_index": computing_layers(hf_config, args.num_layers),
        "index_heads": args.dsa_indexer_n_heads,
        "index_dim": args.dsa_indexer_head_dim,
        "index_topk": args.dsa_indexer_topk,
    }


def computing_layers(hf_config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """For each layer of sparse attention whether it chooses keys, as config.json says: by type, pattern or frequency.

    ``slime_plugins.models.glm5.schedule`` is the trainer's own reading, which a test holds this one against.
    """
    types = hf_config.get("indexer_types") or hf_config.get("index_topk_pattern")
    if types is not None:
        return tuple(entry in ("F", "full") for entry in types[:num_layers])
    freq = max(int(hf_config.get("index_topk_freq") or 1), 1)
    offset = hf_config.get("index_skip_topk_offset")
    offset = 2 if offset is None else int(offset)
    return tuple(max(layer - offset, 0) % freq == 0 for layer in range(1, num_layers + 1))
