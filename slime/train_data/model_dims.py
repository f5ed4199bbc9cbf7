"""The dimensions of a model: one description for plans, FLOPs, converters and weight maps.

``slime.backends.megatron_utils.flags.model_dims`` makes it from the flags.  It is here because the schedule of
micro-batches counts FLOPs and must not import the backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

Fields = tuple[tuple[str, Any], ...]
"""Names and values of fields of :class:`ModelDims`."""
AttentionKind = Literal["grouped", "latent", "sparse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerDims:
    """Sizes of a vision tower: patches, blocks with attention within an image, and mergers of neighbours."""

    parameters: int
    depth: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    patch_size: int
    """Values of a patch."""
    patch_side: int
    """Pixels."""
    merge: int
    """Patches along a side of what becomes one token."""
    out_size: int
    """Width of what the language model takes."""
    num_mergers: int = 1
    """That of the last block, and those of blocks whose features layers take."""
    is_gated: bool = False
    is_trained: bool = False

    def patches_of(self, height: int, width: int) -> int:
        """Return the patches of an image of these pixels, whose sides become multiples of a token's."""
        side = self.patch_side * self.merge
        return max(1, round(height / side)) * max(1, round(width / side)) * self.merge**2

    def forward_flops(self, patches: int) -> int:
        """Return the FLOPs of one forward pass over an image, or a frame, of ``patches`` patches."""
        hidden, merged = self.hidden_size, self.hidden_size * self.merge**2
        mlp = (2 + self.is_gated) * self.ffn_hidden_size
        block = 2 * patches * hidden * (4 * hidden + mlp) + 4 * patches * patches * hidden
        merger = 2 * (patches // self.merge**2) * merged * (merged + self.out_size)
        return 2 * patches * self.patch_size * hidden + self.depth * block + self.num_mergers * merger


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDims:
    """Sizes in elements; of the whole model, before any parallelism cuts it."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    padded_vocab_size: int = 0
    """Rows of the embedding, padding for tensor parallelism included; 0 for no padding."""
    has_tied_embeddings: bool = False
    """The vocabulary projection is the embedding."""
    ffn_hidden_size: int = 0
    is_gated: bool = True
    """The MLP has a gate beside its up projection (SwiGLU)."""
    has_bias: bool = False
    """Biases in all projections."""
    has_centered_norms: bool = False
    """Norms compute ``1 + weight`` in fp32 (``--apply-layernorm-1p``)."""
    norm_params: int = 1
    """Vectors of a norm: 1 for RMSNorm, 2 for LayerNorm."""
    post_norms: int = 0
    """Norms after attention and MLP (GLM-4), 0 to 2."""
    own_parameters: int = 0
    """Parameters of each layer that only its family has, and no other field describes; whole on every rank."""
    own_activations: int = 0
    """Elements of each token that each layer keeps for them until the backward pass, whole on every rank."""
    tower: TowerDims | None = None
    """Of a vision tower beside the layers, which the first pipeline stage has, whole on every rank."""
    learned_positions: int = 0
    """Rows of a learned position embedding."""

    attention: AttentionKind = "grouped"
    """``sparse`` is latent attention with an indexer."""
    num_attention_heads: int
    num_query_groups: int
    """Heads of keys and values; of latent attention not used."""
    head_dim: int
    has_qkv_bias: bool = False
    has_sinks: bool = False
    """Each head has a learned logit in the denominator of the softmax."""
    has_qk_norm: bool = False
    has_output_gate: bool = False
    """Attention's output is multiplied by a gate that comes out of the query projection (Qwen3-Next)."""
    key_projections: int = 2
    """Matrices of keys and values: one where values are keys, none where they are another layer's."""
    norms_all_heads: bool = False
    """The query and key norms are over all heads together (MiniMax-M2), not head by head."""
    q_lora: int | None = None
    """Width of the latent that queries of latent attention come out of; None for no such latent."""
    kv_lora: int = 0
    qk_dim: int = 0
    rope_dim: int = 64
    """Dimensions of a head that turn, in latent attention and in the indexer."""
    v_dim: int = 0

    computes_index: tuple[bool, ...] = ()
    """Sparse attention: which layers choose keys, one entry per layer."""
    index_heads: int = 0
    index_head_dim: int = 128
    index_topk: int = 0

    is_linear: tuple[bool, ...] = ()
    """True for layers with linear attention, a gated delta net; one entry per layer, or none.  The defaults below are
    those of the published models; they count for nothing where no layer has it."""
    linear_key_heads: int = 16
    linear_value_heads: int = 32
    linear_key_dim: int = 128
    linear_value_dim: int = 128
    linear_conv: int = 4
    """Tokens that its convolution sees."""
    is_state_space: bool = False
    """The layers with linear attention are Mamba-2: one gate for each value head, a convolution with biases, a skip
    of each head, a norm of all values."""
    attends: bool = True
    """Layers have attention, linear or not."""
    has_mlp: bool = True
    """Layers have an MLP or experts."""

    is_moe: tuple[bool, ...] = ()
    """True for layers with experts, one entry per layer; empty for none."""
    num_experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    has_shared_gate: bool = False

    num_mtp_layers: int = 0
    trains_mtp: bool = False

    layer_fields: tuple[Fields, ...] = ()
    """Fields with other values in one layer, names and values; one entry per layer, or none."""

    def of_layer(self, layer: int) -> ModelDims:
        """Return the dimensions of layer ``layer`` (from 0), as if all were like it; MTP layers are as ever."""
        return self._with(self.layer_fields[layer]) if layer < len(self.layer_fields) else self

    def _with(self, fields: Fields) -> ModelDims:
        return replace(self, layer_fields=(), **dict(fields)) if fields else self

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding, padding included."""
        return self.padded_vocab_size or self.vocab_size

    @property
    def query_width(self) -> int:
        """Elements of all heads' queries of one token."""
        per_head = self.head_dim if self.attention == "grouped" else self.qk_dim + self.rope_dim
        return self.num_attention_heads * per_head

    @property
    def key_width(self) -> int:
        """Elements of all groups' keys of one token (grouped attention)."""
        return self.num_query_groups * self.head_dim

    @property
    def value_width(self) -> int:
        """Elements of what the output projection of attention reads."""
        return self.num_attention_heads * (self.head_dim if self.attention == "grouped" else self.v_dim)

    @property
    def gate_factor(self) -> int:
        """Projections into the MLP's width."""
        return 2 if self.is_gated else 1

    @property
    def has_query_latent(self) -> bool:
        """True when queries of latent attention come out of their own latent."""
        return self.q_lora is not None

    def has_linear_attention(self, layer: int) -> bool:
        """Return True when layer ``layer`` (from 0) has linear attention; layers inside of MTP layers never do."""
        return layer < len(self.is_linear) and self.is_linear[layer]

    @property
    def linear_gates(self) -> int:
        """Gates of all value heads of linear attention."""
        return self.linear_value_heads * (1 if self.is_state_space else 2)

    @property
    def num_kv_layers(self) -> int:
        """Layers whose attention is not linear."""
        attending = sum(dict(fields).get("attends", True) for fields in self.layer_fields) or self.num_layers
        return attending - sum(self.is_linear)

    @property
    def linear_ratio(self) -> int:
        """Value heads of one key head of linear attention."""
        return self.linear_value_heads // self.linear_key_heads

    @property
    def linear_value_width(self) -> int:
        """Elements of all values, and of the output, of one token in linear attention."""
        return self.linear_value_heads * self.linear_value_dim

    @property
    def linear_channels(self) -> int:
        """Elements of one token that linear attention convolves: queries, keys, values."""
        return 2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_width

    @property
    def linear_group_channels(self) -> int:
        """Those that belong to one key head."""
        return 2 * self.linear_key_dim + self.linear_ratio * self.linear_value_dim

    # --- cost of a sequence; a multiply-add counts as two -----------------------------------------------------------

    def forward_flops(self, length: int) -> int:
        """Return the FLOPs of one forward pass over a sequence of ``length`` tokens; training takes three times that.

        Attention is causal, so the score and value products cost half of the full square.
        """
        head = 2 * length * self.hidden_size * self.vocab_size
        columns = (column or ((),) * self.num_layers for column in (self.layer_fields, self.is_linear, self.is_moe))
        kinds = Counter(zip(*columns, strict=True))  # few, and this is asked for every sample
        return head + sum(
            count * _layer_flops(self._with(fields), length, bool(is_linear), bool(is_moe))
            for (fields, is_linear, is_moe), count in kinds.items()
        )

    def tower_flops(self, images: Iterable[int]) -> int:
        """Return the FLOPs of one forward pass of the vision tower; see :meth:`train_flops` for more.

        Args:
            images: patches of each image.
        """
        return 0 if self.tower is None else sum(map(self.tower.forward_flops, images))

    def train_flops(self, text: float, tower: float) -> float:
        """Return the FLOPs of forward and backward passes, from those of the forward passes."""
        return 3 * text + (3 if self.tower is not None and self.tower.is_trained else 1) * tower


def _layer_flops(dims: ModelDims, length: int, is_linear: bool, is_moe: bool) -> int:
    attention = 0
    if dims.attends:
        grouped = _attention_flops if dims.attention == "grouped" else _latent_flops
        attention = (_linear_flops if is_linear else grouped)(dims, length)
    width = dims.expert_ffn * dims.topk + dims.shared_ffn if is_moe else dims.ffn_hidden_size
    return attention + 2 * (dims.gate_factor + 1) * length * dims.hidden_size * width * dims.has_mlp


def _attention_flops(dims: ModelDims, length: int) -> int:
    widths = dims.query_width * (1 + dims.has_output_gate) + dims.key_projections * dims.key_width
    projections = 2 * length * dims.hidden_size * widths
    output = 2 * length * dims.query_width * dims.hidden_size
    scores_and_values = 2 * length * length * dims.query_width
    return projections + scores_and_values + output


def _latent_flops(dims: ModelDims, length: int) -> int:
    heads, hidden = dims.num_attention_heads, dims.hidden_size
    if dims.q_lora:
        query = 2 * length * dims.q_lora * (hidden + dims.query_width)
    else:
        query = 2 * length * hidden * dims.query_width
    key_value = dims.kv_lora * (hidden + heads * (dims.qk_dim + dims.v_dim))
    key_value = 2 * length * (key_value + hidden * dims.rope_dim)
    scores_and_values = length * length * (dims.query_width + dims.value_width)
    output = 2 * length * dims.value_width * hidden
    return query + key_value + scores_and_values + output


def _linear_flops(dims: ModelDims, length: int) -> int:
    """Return the FLOPs of linear attention: per token and value head a write of the state and two reads, of
    Mamba-2 one.
    """
    widths = dims.linear_channels + 2 * dims.linear_value_width + dims.linear_gates
    projections = 2 * length * dims.hidden_size * widths
    touches = 2 if dims.is_state_space else 3
    return projections + 2 * touches * length * dims.linear_value_width * dims.linear_key_dim
