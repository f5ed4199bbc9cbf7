"""Activations that a forward pass keeps for the backward pass, per layer, as the trainer's layers are written.

Every term names the tensor and why autograd keeps it; the sum over a layer is what one micro-batch costs there.  The
rules: a matrix product keeps its input, a norm its input, the flash kernel queries, keys, values and its output; a
view keeps the whole tensor behind it; rotary embedding, residual adds and copies keep nothing.

Shapes: T = tokens of the micro-batch on this context-parallel rank, s = those of this tensor-parallel rank under
sequence parallelism (else T), t = tensor-parallel size, R = rows that this rank's experts see when routing is even.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.backends.megatron_utils.flags.parallel import ParallelSizes
from slime.train_data.model_dims import ModelDims


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """``--recompute-*``: what is computed again in the backward pass instead of being kept."""

    granularity: str | None = None
    """None, "full" or "selective"."""
    method: str | None = None
    """Of full: "uniform" keeps the input of every ``num_layers`` layers, "block" recomputes the first so many."""
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)
    """Of selective."""

    def drops(self, module: str) -> bool:
        """Return True when selective recompute covers ``module``."""
        return self.granularity == "selective" and module in self.modules


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The largest packed micro-batch of a rank."""

    tokens: int
    """T, padding included."""
    element_bytes: int = 2
    patches: int = 0
    """Of the images that this rank computes."""


Terms = dict[str, int]
"""Bytes by the name of what is kept."""


def local_tokens(batch: MicroBatch, sizes: ParallelSizes) -> int:
    """Return the tokens outside of attention and MLP: cut over tensor-parallel ranks under sequence parallelism."""
    return -(-batch.tokens // (sizes.tensor if sizes.sequence_parallel else 1))


def layer_terms(
    dims: ModelDims, sizes: ParallelSizes, batch: MicroBatch, layer: int, recompute: Recompute | None = None
) -> Terms:
    """Return the activations that layer ``layer`` (from 0) keeps when it is not recomputed as a whole."""
    dims = dims.of_layer(layer)
    recompute = recompute or Recompute()
    row = local_tokens(batch, sizes) * dims.hidden_size * batch.element_bytes
    keeps_norms = not recompute.drops("layernorm")
    attends, has_mlp = dims.attends, dims.has_mlp
    terms = {
        "residual before attention": row * _norm_copy(dims, batch) * attends,
        "norm before attention": row * keeps_norms * attends,
        "residual before the MLP": row * _norm_copy(dims, batch) * has_mlp,
        "norm before the MLP": row * keeps_norms * has_mlp,
        "norms after attention and MLP": row * dims.post_norms,
        "what only the family has": local_tokens(batch, sizes) * dims.own_activations * batch.element_bytes,
        "statistics of norms": 4 * local_tokens(batch, sizes) * (attends + has_mlp + dims.post_norms),
    }
    if dims.has_linear_attention(layer):
        terms |= _linear_terms(dims, sizes, batch, recompute)
    elif dims.attention == "grouped":
        terms |= _grouped_terms(dims, sizes, batch) if attends else {}
    elif dims.attention == "latent":
        terms |= _latent_terms(dims, sizes, batch, recompute)
    else:
        terms |= _sparse_terms(dims, sizes, batch, layer)
    if dims.is_moe[min(layer, dims.num_layers - 1)]:
        return terms | _expert_terms(dims, sizes, batch, recompute)
    if not has_mlp:
        return terms
    width = batch.tokens * dims.ffn_hidden_size // sizes.tensor * batch.element_bytes
    return terms | {"MLP": 0 if recompute.drops("mlp") else width * (dims.gate_factor + 1)}


def _norm_copy(dims: ModelDims, batch: MicroBatch) -> int:
    return 4 // batch.element_bytes if dims.has_centered_norms else 1


def _grouped_terms(dims: ModelDims, sizes: ParallelSizes, batch: MicroBatch) -> Terms:
    tokens, size = batch.tokens, batch.element_bytes
    query = tokens * dims.query_width // sizes.tensor * size
    key = tokens * max(dims.key_width // sizes.tensor, dims.head_dim) * size
    heads = dims.num_attention_heads // sizes.tensor
    terms = {
        "queries": query,
        "keys and values": 2 * key,
        "attention output": query,
        "softmax statistics": 4 * tokens * heads,
    }
    if sizes.context > 1:
        # Two halves with (r + 1) and (2 cp - r) chunks of keys: 2 cp + 1 chunks, a rank's tokens are two.
        terms["keys and values"] = (2 * sizes.context + 1) * key
        terms["attention output, in order"] = query
    if dims.has_output_gate:
        terms["sigmoid of the gate in fp32, output times it"] = (4 // size + 1) * query
        terms["gate"] = query * (not dims.has_qk_norm)  # otherwise part of the projection that is kept anyway
    if dims.has_qk_norm:
        # Norms keep their inputs: the queries, and the keys' view of the whole projection.
        terms["projection to queries, keys, values"] = query * (1 + dims.has_output_gate) + 2 * key
        terms["queries before their norm"] = query * _norm_copy(dims, batch)
        terms["keys before their norm"] = key * _norm_copy(dims, batch) * dims.has_centered_norms
        normed = 2 if dims.norms_all_heads else heads + max(dims.num_query_groups // sizes.tensor, 1)
        terms["statistics of query and key norms"] = 4 * tokens * normed
    return terms


DELTA_CHUNK = 64
"""Tokens that the gated delta rule treats at once (``slime_plugins.models.qwen3_next.packed_rows.CHUNK``)."""


def _linear_terms(dims: ModelDims, sizes: ParallelSizes, batch: MicroBatch, recompute: Recompute) -> Terms:
    """Return the activations of a gated delta net, or of Mamba-2, in plain fp32 torch; kernels keep a fraction of it.

    Context parallelism changes nothing: a rank has all tokens for a share of its heads.
    """
    tokens, chunk, element = batch.tokens, DELTA_CHUNK, batch.element_bytes
    keys, values = dims.linear_key_heads // sizes.tensor, dims.linear_value_heads // sizes.tensor
    key_dim, value_dim = dims.linear_key_dim, dims.linear_value_dim
    channels = dims.linear_channels // sizes.tensor
    one = 4 * tokens
    if dims.is_state_space:
        terms = {
            "gate, output and their norm": 5 * values * value_dim * one,
            "attention output": values * value_dim * tokens * element,
        }
        inside = {
            "convolution": 2 * channels * tokens * element,
            "queries and keys": 2 * keys * key_dim * one,
            "products within chunks": (keys + 2 * values) * chunk * one,
            "values, and what is written": 3 * values * value_dim * one,
            "keys and queries with their decays": 2 * values * key_dim * one,
            "states in front of chunks": 2 * values * key_dim * value_dim * one // chunk,
        }
        return terms | dict.fromkeys(inside, 0) if recompute.drops("core_attn") else terms | inside
    terms = {
        "before the gated norm": values * value_dim * one,
        "gate and its sigmoid": 3 * values * value_dim * one,
        "attention output": values * value_dim * tokens * element,
    }
    inside = {
        "convolution": 2 * channels * tokens * element,
        "queries and keys": 8 * keys * key_dim * one,
        "products within chunks": (2 * keys + 4 * values) * chunk * one,
        "values, and what is written": 2 * values * value_dim * one,
        "solution of the triangular system": values * (key_dim + value_dim) * one,
        "keys and queries with their decays": 2 * values * key_dim * one,
        "states in front of chunks": values * key_dim * value_dim * one // chunk,
    }
    return terms | dict.fromkeys(inside, 0) if recompute.drops("core_attn") else terms | inside


def _latents(dims: ModelDims, sizes: ParallelSizes, batch: MicroBatch) -> int:
    return (
        local_tokens(batch, sizes) * batch.element_bytes * (2 * (dims.q_lora or 0) + 2 * dims.kv_lora + dims.rope_dim)
    )


def _latent_terms(dims: ModelDims, sizes: ParallelSizes, batch: MicroBatch, recompute: Recompute) -> Terms:
    heads = dims.num_attention_heads // sizes.tensor
    per_element = batch.tokens * heads * batch.element_bytes
    width, value_width = dims.qk_dim + dims.rope_dim, dims.v_dim
    padded = max(width, value_width)  # the kernel wants one head dimension
    keys = (2 * sizes.context + 1 if sizes.context > 1 else 2) * padded
    is_copied = padded != value_width or sizes.context > 1
    terms = {
        "latents": _latents(dims, sizes, batch),
        "queries": per_element * padded,
        "keys and values": per_element * keys,
        "attention output": per_element * (padded + is_copied * value_width),
        "softmax statistics": 4 * batch.tokens * heads,
    }
    if recompute.drops("mla_up_proj"):
        terms |= {"queries": 0, "keys and values": 0}
    return terms


def _sparse_terms(dims: ModelDims, sizes: ParallelSizes, batch: MicroBatch, layer: int) -> Terms:
    """Return the activations of attention over latents: queries of their width, keys of the whole stream."""
    heads = dims.num_attention_heads // sizes.tensor
    per_element = batch.tokens * heads * batch.element_bytes
    latent_width = dims.kv_lora + dims.rope_dim
    computes = layer >= dims.num_layers or dims.computes_index[layer]
    return {
        "latents": _latents(dims, sizes, batch),
        "queries": per_element * (dims.qk_dim + dims.rope_dim + latent_width),
        "keys of the stream": batch.tokens * sizes.context * latent_width * batch.element_bytes,
        "attention output": per_element * (dims.kv_lora + dims.v_dim),
        "softmax statistics": 4 * batch.tokens * heads,
        "chosen keys": 4 * batch.tokens * dims.index_topk * computes,
    }


def _expert_terms(dims: ModelDims, sizes: ParallelSizes, batch: MicroBatch, recompute: Recompute) -> Terms:
    if recompute.drops("moe"):
        return {}
    tokens = local_tokens(batch, sizes)
    copies = tokens * dims.topk
    rows = copies * sizes.expert_tensor
    inner = rows * dims.expert_ffn // sizes.expert_tensor * batch.element_bytes
    shared = batch.tokens * dims.shared_ffn // sizes.tensor * batch.element_bytes
    return {
        # Scores in fp32, maps of rows in int64.
        "router": 8 * tokens * dims.num_experts + 36 * copies + 12 * tokens + 8,
        "rows of experts": rows * dims.hidden_size * batch.element_bytes,
        "inside of experts": inner * dims.gate_factor + (0 if recompute.drops("moe_act") else inner),
        "weights of rows": 4 * rows,
        "shared experts": 0 if recompute.drops("shared_experts") else shared * (dims.gate_factor + 1),
        "output of shared experts": dims.has_shared_gate * tokens * dims.hidden_size * batch.element_bytes,
    }


def layer_bytes(
    dims: ModelDims, sizes: ParallelSizes, batch: MicroBatch, layer: int, recompute: Recompute | None = None
) -> int:
    """Return the sum of :func:`layer_terms`."""
    return sum(layer_terms(dims, sizes, batch, layer, recompute).values())


@dataclass(frozen=True, slots=True)
class Kept:
    """Activations that one micro-batch keeps on a stretch of layers, and its backward pass's temporary ones."""

    kept: int
    again: int
    """Of the layers that are recomputed together, the largest."""


def chunk_activations(
    layers: tuple[int, ...], dims: ModelDims, sizes: ParallelSizes, batch: MicroBatch, recompute: Recompute
) -> Kept:
    """Return the activations that the layers of one pipeline chunk keep for one micro-batch."""
    each = [layer_bytes(dims, sizes, batch, layer, recompute) for layer in layers]
    boundary = local_tokens(batch, sizes) * dims.hidden_size * batch.element_bytes
    if recompute.granularity != "full":
        return Kept(sum(each), 0)
    if recompute.method == "block":
        count = min(recompute.num_layers, len(layers))
        return Kept(count * boundary + sum(each[count:]), max(each[:count], default=0))
    groups = [each[start : start + recompute.num_layers] for start in range(0, len(each), recompute.num_layers)]
    return Kept(len(groups) * boundary, max(map(sum, groups), default=0))


def tower_activations(dims: ModelDims, batch: MicroBatch) -> Kept:
    """Return the activations of the vision tower (``transformers``' modules, never recomputed) for the images.

    A frozen one keeps its output, and has those of one block at once.
    """
    tower, size = dims.tower, batch.element_bytes
    if tower is None or not batch.patches:
        return Kept(0, 0)
    hidden = tower.hidden_size
    # Inputs of both norms and of four products, queries, keys and values before and after they are turned, the
    # output of attention; the MLP's inner tensors.
    elements = 11 * hidden + (2 + 2 * tower.is_gated) * tower.ffn_hidden_size
    block = size * elements + 16 + 4 * tower.num_heads  # statistics of norms and softmax
    angles = 8 * hidden // tower.num_heads  # cosines and sines of a head in fp32, for all blocks
    mergers = size * (3 * tower.num_mergers + 1) * hidden
    output = size * tower.num_mergers * tower.out_size // tower.merge**2
    if not tower.is_trained:
        return Kept(batch.patches * output, batch.patches * (block + angles))
    pixels = (size + 4) * tower.patch_size
    return Kept(batch.patches * (tower.depth * block + angles + mergers + output + pixels), 0)


def backward_work(dims: ModelDims, sizes: ParallelSizes, batch: MicroBatch, layers: tuple[int, ...]) -> int:
    """Return the bytes of gradients that are alive beside what was kept, in the layer with the most.

    Those of an MLP's two inner tensors and of its input, and of one of its weights before it is added up.
    """
    most, whole = 0, dims
    for layer in set(layers) & set(range(dims.num_layers)):
        dims = whole.of_layer(layer)
        if dims.is_moe[layer]:
            rows = local_tokens(batch, sizes) * dims.topk * sizes.expert_tensor
            inner = (dims.gate_factor + 1) * dims.expert_ffn // sizes.expert_tensor
            weight = dims.num_experts // sizes.expert * dims.gate_factor * dims.expert_ffn // sizes.expert_tensor
        else:
            rows, inner = batch.tokens, (dims.gate_factor + 1) * dims.ffn_hidden_size // sizes.tensor
            weight = dims.gate_factor * dims.ffn_hidden_size // sizes.tensor
        most = max(most, rows * inner + rows * dims.hidden_size + weight * dims.hidden_size)
    return batch.element_bytes * (most + 2 * local_tokens(batch, sizes) * dims.hidden_size)


def head_activations(
    dims: ModelDims, sizes: ParallelSizes, batch: MicroBatch, *, mtp_chunk: int, recompute: Recompute
) -> Terms:
    """Return the activations of the last stage at the moment its backward pass begins.

    The gradient of the logits is written over them.  That of the vocabulary projection exists once in the weights'
    dtype before it is added to the gradient sums.
    """
    size = batch.element_bytes
    columns = dims.vocab_rows // sizes.tensor
    row = local_tokens(batch, sizes) * dims.hidden_size * size
    whole_row = batch.tokens * dims.hidden_size * size
    terms = {
        "final norm": 2 * row + 4 * local_tokens(batch, sizes),
        "logits": batch.tokens * columns * size,
        "gradient of the vocabulary projection": columns * dims.hidden_size * size,
        "hidden states and their gradient": whole_row + (whole_row if sizes.sequence_parallel else 0) + row,
    }
    if dims.trains_mtp and dims.num_mtp_layers:
        rows = batch.tokens if mtp_chunk <= 0 else min(mtp_chunk, batch.tokens)
        inner = layer_bytes(dims, sizes, batch, dims.num_layers, recompute) + 8 * row
        terms["MTP layers"] = inner + 2 * row if recompute.granularity == "full" else inner * dims.num_mtp_layers
        terms["logits of MTP layers"] = rows * columns * size
    return terms
