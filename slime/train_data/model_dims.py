"""The dimensions of a model: one description for memory plans, FLOPs, converters and weight maps.

``slime.backends.megatron_utils.flags.model_dims`` creates it from the flags.  It is in this package because the
micro-batch schedule counts FLOPs and must not import the backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

Fields = tuple[tuple[str, Any], ...]
"""(name, value) of fields of :class:`ModelDims`."""
AttentionKind = Literal["grouped", "latent", "sparse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerDims:
    """Sizes of a vision tower: patch embedding, blocks with attention within an image, and patch mergers."""

    parameters: int
    depth: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    patch_size: int
    """Number of input values of a patch."""
    patch_side: int
    """Side of a patch in pixels."""
    merge: int
    """A token merges ``merge`` x ``merge`` patches."""
    out_size: int
    """Width of the features that the language model gets."""
    num_mergers: int = 1
    """One after the last block, and one for each block whose features go into layers of the language model."""
    is_gated: bool = False
    is_trained: bool = False

    def patches_of(self, height: int, width: int) -> int:
        """Return the number of patches of an image, given in pixels; its sides are rounded to multiples of a token."""
        side = self.patch_side * self.merge
        return max(1, round(height / side)) * max(1, round(width / side)) * self.merge**2

    def forward_flops(self, patches: int) -> int:
        """Return the FLOPs of one forward pass over an image or frame with ``patches`` patches."""
        hidden, merged = self.hidden_size, self.hidden_size * self.merge**2
        mlp = (2 + self.is_gated) * self.ffn_hidden_size
        block = 2 * patches * hidden * (4 * hidden + mlp) + 4 * patches * patches * hidden
        merger = 2 * (patches // self.merge**2) * merged * (merged + self.out_size)
        return 2 * patches * self.patch_size * hidden + self.depth * block + self.num_mergers * merger


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDims:
    """Sizes of the whole model in elements, before any parallelism splits it."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    padded_vocab_size: int = 0
    """Rows of the embedding including padding for tensor parallelism; 0 means no padding."""
    has_tied_embeddings: bool = False
    """The vocabulary projection shares the embedding's weight."""
    ffn_hidden_size: int = 0
    is_gated: bool = True
    """The MLP has a gate projection besides its up projection (SwiGLU)."""
    has_bias: bool = False
    """All projections have biases."""
    has_centered_norms: bool = False
    """Norms compute ``1 + weight`` in fp32 (``--apply-layernorm-1p``)."""
    norm_params: int = 1
    """Parameter vectors per norm: 1 for RMSNorm, 2 for LayerNorm."""
    post_norms: int = 0
    """Norms after attention and MLP per layer (GLM-4), 0 to 2."""
    own_parameters: int = 0
    """Family-specific parameters per layer that no other field describes; replicated on every rank."""
    own_activations: int = 0
    """Elements per token that each layer saves for ``own_parameters`` until the backward pass; replicated."""
    tower: TowerDims | None = None
    """Vision tower of the model, replicated on every rank of the first pipeline stage."""
    learned_positions: int = 0
    """Rows of a learned position embedding; 0 if there is none."""

    attention: AttentionKind = "grouped"
    """``sparse`` is latent attention with an indexer."""
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads; not used by latent attention."""
    head_dim: int
    has_qkv_bias: bool = False
    has_sinks: bool = False
    """Each head has a learned logit (attention sink) in the denominator of the softmax."""
    has_qk_norm: bool = False
    has_output_gate: bool = False
    """Attention's output is multiplied by a gate computed by the query projection (Qwen3-Next)."""
    key_projections: int = 2
    """Number of key and value projections: 1 if values equal keys, 0 if another layer's keys and values are used."""
    norms_all_heads: bool = False
    """The query and key norms span all heads together (MiniMax-M2) instead of each head."""
    q_lora: int | None = None
    """Width of the query latent of latent attention; None if queries have no latent."""
    kv_lora: int = 0
    qk_dim: int = 0
    rope_dim: int = 64
    """Dimensions of a head with rotary embedding, in latent attention and in the indexer."""
    v_dim: int = 0

    computes_index: tuple[bool, ...] = ()
    """Sparse attention: which layers run the indexer that selects keys, one entry per layer."""
    index_heads: int = 0
    index_head_dim: int = 128
    index_topk: int = 0

    is_linear: tuple[bool, ...] = ()
    """True for layers with linear attention (gated delta net), one entry per layer; empty for none.  The defaults
    below are those of the published models and have no effect without such layers."""
    linear_key_heads: int = 16
    linear_value_heads: int = 32
    linear_key_dim: int = 128
    linear_value_dim: int = 128
    linear_conv: int = 4
    """Kernel size of its convolution in tokens."""
    is_state_space: bool = False
    """The layers with linear attention are Mamba-2: one gate per value head, a convolution with biases, one skip
    parameter per head, and a norm over all values."""
    attends: bool = True
    """Layers have attention, softmax or linear."""
    has_mlp: bool = True
    """Layers have an MLP or experts."""

    is_moe: tuple[bool, ...] = ()
    """True for layers with experts, one entry per layer; empty if no layer has experts."""
    num_experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    has_shared_gate: bool = False

    num_mtp_layers: int = 0
    trains_mtp: bool = False

    layer_fields: tuple[Fields, ...] = ()
    """Fields overridden per layer, one entry per layer; empty if all layers are alike."""

    def of_layer(self, layer: int) -> ModelDims:
        """Return the dimensions with the overrides of layer ``layer`` (from 0) applied; MTP layers have none."""
        return self._with(self.layer_fields[layer]) if layer < len(self.layer_fields) else self

    def _with(self, fields: Fields) -> ModelDims:
        return replace(self, layer_fields=(), **dict(fields)) if fields else self

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding, including padding."""
        return self.padded_vocab_size or self.vocab_size

    @property
    def query_width(self) -> int:
        """Elements of one token's queries over all heads."""
        per_head = self.head_dim if self.attention == "grouped" else self.qk_dim + self.rope_dim
        return self.num_attention_heads * per_head

    @property
    def key_width(self) -> int:
        """Elements of one token's keys over all groups (grouped attention)."""
        return self.num_query_groups * self.head_dim

    @property
    def value_width(self) -> int:
        """Input width of attention's output projection."""
        return self.num_attention_heads * (self.head_dim if self.attention == "grouped" else self.v_dim)

    @property
    def gate_factor(self) -> int:
        """Number of projections into the MLP's width: 2 with a gate, else 1."""
        return 2 if self.is_gated else 1

    @property
    def has_query_latent(self) -> bool:
        """True if queries of latent attention are computed from their own latent."""
        return self.q_lora is not None

    def has_linear_attention(self, layer: int) -> bool:
        """Return True if layer ``layer`` (from 0) has linear attention; layers inside MTP layers never do."""
        return layer < len(self.is_linear) and self.is_linear[layer]

    @property
    def linear_gates(self) -> int:
        """Number of gates of linear attention over all value heads."""
        return self.linear_value_heads * (1 if self.is_state_space else 2)

    @property
    def num_kv_layers(self) -> int:
        """Number of layers with softmax attention, which have a KV cache."""
        attending = sum(dict(fields).get("attends", True) for fields in self.layer_fields) or self.num_layers
        return attending - sum(self.is_linear)

    @property
    def linear_ratio(self) -> int:
        """Value heads per key head of linear attention."""
        return self.linear_value_heads // self.linear_key_heads

    @property
    def linear_value_width(self) -> int:
        """Elements of one token's values, and of its output, in linear attention."""
        return self.linear_value_heads * self.linear_value_dim

    @property
    def linear_channels(self) -> int:
        """Elements per token that linear attention convolves: queries, keys and values."""
        return 2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_width

    @property
    def linear_group_channels(self) -> int:
        """The part of ``linear_channels`` that belongs to one key head."""
        return 2 * self.linear_key_dim + self.linear_ratio * self.linear_value_dim

    # --- cost of a sequence; a multiply-add counts as two -----------------------------------------------------------

    def forward_flops(self, length: int) -> int:
        """Return the FLOPs of one forward pass over a sequence of ``length`` tokens; training costs three times that.

        Attention is causal, so the score and value products cost half of the full square.  Sparse attention is counted
        as dense, without its indexer; MTP layers are not counted.
        """
        head = 2 * length * self.hidden_size * self.vocab_size
        columns = (column or ((),) * self.num_layers for column in (self.layer_fields, self.is_linear, self.is_moe))
        kinds = Counter(zip(*columns, strict=True))  # few kinds, and this is called for every sample
        return head + sum(
            count * _layer_flops(self._with(fields), length, bool(is_linear), bool(is_moe))
            for (fields, is_linear, is_moe), count in kinds.items()
        )

    def tower_flops(self, images: Iterable[int]) -> int:
        """Return the FLOPs of one forward pass of the vision tower; 0 without a tower.

        Args:
            images: Number of patches of each image.
        """
        return 0 if self.tower is None else sum(map(self.tower.forward_flops, images))

    def train_flops(self, text: float, tower: float) -> float:
        """Return the FLOPs of forward and backward passes, given those of the forward passes of text and tower."""
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
    """Return the FLOPs of linear attention.

    Per token and value head, the state is written once and read twice (once for Mamba-2).
    """
    widths = dims.linear_channels + 2 * dims.linear_value_width + dims.linear_gates
    projections = 2 * length * dims.hidden_size * widths
    touches = 2 if dims.is_state_space else 3
    return projections + 2 * touches * length * dims.linear_value_width * dims.linear_key_dim
