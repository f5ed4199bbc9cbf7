"""DeepSeek-V4: attention to a window and compressed entries, hyper-connections, experts chosen by router or table.

Folders and engines use the names of the published checkpoints, not those of transformers' class.  The table of the
first layers' experts (``tid2eid``) is a constant that trainer, engines and exports read from ``--hf-checkpoint``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.flag_rules import PLAIN, Config, Flag
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
from slime.train_data.model_dims import ModelDims
from slime_plugins.models.shared_weights import gate_up_rule

SPARSE, HEAVY, WINDOW = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
"""Values of ``layer_types``: attention to entries that an indexer selects, to all entries, to none."""
HYPER_PARTS = ("fn", "base", "scale")
"""Parameters of a hyper-connection."""


@dataclass(frozen=True, slots=True)
class V4Layers:
    """Settings of the layers in config.json that model flags do not express; layers are counted from 1."""

    kinds: tuple[str, ...]
    chosen_by_table: tuple[bool, ...]
    """True for layers whose experts depend only on the token id."""
    rates: Mapping[str, int]
    """Kind of layer -> tokens per compressed entry."""
    head_dim: int
    rope_dim: int
    """Number of rotated dimensions of a head, the last ones; also for the indexer's heads."""
    query_rank: int
    out_groups: int
    """Groups of heads that the output projection first projects separately."""
    out_rank: int
    """Width of a group's projection."""
    index_heads: int
    index_dim: int
    index_topk: int
    num_streams: int
    """Residual streams."""
    sinkhorn_steps: int
    hyper_epsilon: float
    window_rotary: Mapping[str, Any]
    """Rotary settings of the layers with only a window."""
    entry_rotary: Mapping[str, Any]
    """Rotary settings of the other layers."""

    @classmethod
    def of(cls, config: Config) -> V4Layers:
        """Read a config.json with defaults filled in."""
        return cls(
            kinds=tuple(config["layer_types"]),
            chosen_by_table=tuple(kind == "hash_moe" for kind in config["mlp_layer_types"]),
            rates=config["compress_rates"],
            head_dim=config["head_dim"],
            rope_dim=int(config["head_dim"] * config["partial_rotary_factor"]),
            query_rank=config["q_lora_rank"],
            out_groups=config["o_groups"],
            out_rank=config["o_lora_rank"],
            index_heads=config["index_n_heads"],
            index_dim=config["index_head_dim"],
            index_topk=config["index_topk"],
            num_streams=config["hc_mult"],
            sinkhorn_steps=config["hc_sinkhorn_iters"],
            hyper_epsilon=config["hc_eps"],
            window_rotary=config["rope_parameters"]["main"],
            entry_rotary=config["rope_parameters"]["compress"],
        )

    def rate(self, layer: int) -> int:
        """Return the tokens per compressed entry of a layer; 0 if it has no entries."""
        return self.rates.get(self.kinds[layer - 1], 0)

    def has_indexer(self, layer: int) -> bool:
        return self.kinds[layer - 1] == SPARSE


def compressor_rules(megatron: str, hf: str) -> tuple[Rule, ...]:
    """Return the rules of a compressor's parameters."""
    names = ("wkv.weight", "wgate.weight", "norm.weight", "ape")
    return tuple(Rule(f"{megatron}.{name}", (f"{hf}.{name}",)) for name in names)


DEEPSEEK_V4 = WeightMap(
    family="DeepSeek-V4",
    top=(
        Rule("embedding.word_embeddings.weight", ("embed.weight",)),
        Rule("output_layer.weight", ("head.weight",)),
        Rule("decoder.final_layernorm.weight", ("norm.weight",)),
        *(Rule(f"stream_head.{part}", (f"hc_head_{part}",)) for part in HYPER_PARTS),
    ),
    layer=(
        Rule("input_layernorm.weight", ("attn_norm.weight",)),
        Rule("pre_mlp_layernorm.weight", ("ffn_norm.weight",)),
        *(
            Rule(f"{half}_streams.{part}", (f"hc_{hf}_{part}",))
            for half, hf in (("attention", "attn"), ("mlp", "ffn"))
            for part in HYPER_PARTS
        ),
        Rule("self_attention.linear_q_down_proj.weight", ("attn.wq_a.weight",)),
        Rule("self_attention.q_layernorm.weight", ("attn.q_norm.weight",)),
        Rule("self_attention.linear_q_up_proj.weight", ("attn.wq_b.weight",)),
        Rule("self_attention.linear_kv_proj.weight", ("attn.wkv.weight",)),
        Rule("self_attention.kv_layernorm.weight", ("attn.kv_norm.weight",)),
        Rule("self_attention.core_attention.softmax_offset", ("attn.attn_sink",)),
        Rule("self_attention.linear_group_proj.weight", ("attn.wo_a.weight",)),
        Rule("self_attention.linear_proj.weight", ("attn.wo_b.weight",)),
        *compressor_rules("self_attention.compressor", "attn.compressor"),
        *compressor_rules("self_attention.indexer.compressor", "attn.indexer.compressor"),
        Rule("self_attention.indexer.wq_b.weight", ("attn.indexer.wq_b.weight",)),
        Rule("self_attention.indexer.weights_proj.weight", ("attn.indexer.weights_proj.weight",)),
        Rule("mlp.router.weight", ("ffn.gate.weight",)),
        Rule("mlp.router.expert_bias", ("ffn.gate.bias",)),
        *(
            rule
            for megatron, hf, number in (
                ("mlp.experts", "ffn.experts.{expert}", "{expert}"),
                ("mlp.shared_experts", "ffn.shared_experts", ""),
            )
            for rule in (
                gate_up_rule(f"{megatron}.linear_fc1.weight{number}", f"{hf}.w1.weight", f"{hf}.w3.weight"),
                Rule(f"{megatron}.linear_fc2.weight{number}", (f"{hf}.w2.weight",)),
            )
        ),
    ),
    layer_prefix="layers.{layer}.",
    untrained=(r"mtp\..*", r"layers\.\d+\.ffn\.gate\.tid2eid"),
    engine_fp32=(*(f"_{part}" for part in HYPER_PARTS), "attn_sink", "compressor.ape"),
    not_applied=(".linear_group_proj.weight",),
    # weights_proj weights the indexer's heads, engines multiply wo_a out, and hold the rest as plain linear layers.
    plain_parts=("weights_proj", ".wo_a.", ".compressor.", "head."),
    computed_in_fp32=(
        *(".softmax_offset", ".weights_proj.weight"),
        *(f"{of}.{part}" for of in ("_streams", "stream_head") for part in HYPER_PARTS),
        "compressor.ape",
    ),
    # SGLang fuses each pair into one parameter, and asserts that both arrive in one call.
    together=(("attn.wq_a", "attn.wkv"), ("compressor.wkv", "compressor.wgate")),
)


def deepseek_v4_flags(config: Config) -> Iterator[Flag | str]:
    """Yield window, clamp and scores, and messages for rotary positions that the layers do not support."""
    yield Flag("moe_router_score_function", "sigmoid", "the layers take sqrt(softplus) in its place")
    yield Flag("position_embedding_type", "none", "each kind of layer has other angles")
    if config.get("sliding_window"):
        width = config["sliding_window"]
        yield Flag("window_size", (width - 1, 0), f"sliding_window is {width}: {width - 1},0")
    if config.get("swiglu_limit") is not None:
        yield Flag("activation_func_clamp_value", config["swiglu_limit"], f"swiglu_limit is {config['swiglu_limit']}")
    rotary = config.get("rope_parameters") or {}
    window, entries = rotary.get("main") or {}, rotary.get("compress") or {}
    if window.get("rope_type", "default") != "default":
        yield f"layers with a window alone turn by plain angles; main of rope_parameters has {window}"
    is_known = entries.get("rope_type", "default") in ("default", "yarn")
    if not is_known or entries.get("attention_factor") not in (None, 1):
        yield f"compressed entries turn by plain angles or YaRN's, of magnitude 1; compress has {entries}"


def deepseek_v4_dims(dims: ModelDims, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return latent attention of equal cost, plus per-layer corrections; nothing if only flags are known."""
    if not config or not config.get("layer_types"):
        return {}
    layers, hidden = V4Layers.of(config), dims.hidden_size
    head, streams = layers.head_dim, layers.num_streams
    mixes = (2 + streams) * streams
    fields = []
    for layer in range(1, len(layers.kinds) + 1):
        own = layers.query_rank + head + (head - layers.rope_dim) * hidden
        own += 2 * (mixes * streams * hidden + mixes + 3)
        if layer == len(layers.kinds):
            own += streams * streams * hidden + streams + 1
        for width in (head, layers.index_dim) if layers.has_indexer(layer) else (head,) * bool(layers.rate(layer)):
            series = 2 if layers.has_indexer(layer) else 1
            own += series * width * (2 * hidden + layers.rate(layer)) + width
        if layers.has_indexer(layer):
            own += layers.index_heads * (layers.query_rank * layers.index_dim + hidden)
        fields.append((("own_parameters", own),))
    return {
        **{"attention": "latent", "q_lora": layers.query_rank, "kv_lora": 0, "rope_dim": layers.rope_dim},
        "qk_dim": head - layers.rope_dim,
        # Both output matrices, as one of this width.
        "v_dim": layers.out_rank * head // hidden + layers.out_groups * layers.out_rank // dims.num_attention_heads,
        "own_activations": 4 * streams * hidden,
        "layer_fields": tuple(fields),
    }


FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "layer_types": [WINDOW, WINDOW, *[SPARSE, HEAVY] * 20, SPARSE],
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
    "compress_rates": {SPARSE: 4, HEAVY: 128},
    **{"head_dim": 512, "partial_rotary_factor": 0.125, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024},
    **{"index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "sliding_window": 128},
    **{"hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6},
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0},
        "compress": {
            **{"rope_type": "yarn", "rope_theta": 160000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0},
            "original_max_position_embeddings": 65536,
        },
    },
}
"""Settings in the config.json of DeepSeek-V4-Flash that model flags do not express, with defaults filled in."""
FAMILIES = (
    ModelFamily(
        model_types=("deepseek_v4",),
        weight_map=DEEPSEEK_V4,
        spec="slime_plugins.models.deepseek_v4 get_deepseek_v4_spec",
        dims=deepseek_v4_dims,
        always={"softmax_type": "learnable", "moe_router_enable_expert_bias": True},
        fixed={
            **PLAIN,
            **{"attention_bias": False, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True},
            **{"n_shared_experts": 1, "num_key_value_heads": 1},
        },
        sizes={
            "q_lora_rank": "q_lora_rank",
            "index_n_heads": "dsa_indexer_n_heads",
            "index_head_dim": "dsa_indexer_head_dim",
            "index_topk": "dsa_indexer_topk",
        },
        flags=deepseek_v4_flags,
        num_experts_key="n_routed_experts",
        published={"DeepSeek-V4-Flash-bf16": FLASH},
    ),
)
