"""Dimensions of the model and packing of its batches, from the flags alone.  Does not import Megatron."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slime.backends.megatron_utils.models import family_of_spec
from slime.flags.data import BatchConfig
from slime.train_data.model_dims import AttentionKind, ModelDims, TowerDims

if TYPE_CHECKING:
    from slime.train_data.schedule import ScheduleConfig


def model_dims(args: Namespace, hf_config: Mapping[str, Any] | None = None) -> ModelDims:
    """Return the dimensions that Megatron's flags describe.

    Args:
        args: flags of this run, or those stored in a checkpoint, perhaps by another program.  Attributes that a family
            does not use may be absent; the sizes of published models then apply.
        hf_config: config.json, the only source for which layers of sparse attention select keys.
    """
    get = vars(args).get
    num_layers, heads = args.num_layers, args.num_attention_heads
    attention: AttentionKind = "latent" if get("multi_latent_attention") else "grouped"
    family = family_of_spec(get("spec"))
    groups = get("num_query_groups") if get("group_query_attention", True) else None
    has_positions = get("position_embedding_type") == "learned_absolute"
    dims = ModelDims(
        num_layers=num_layers,
        hidden_size=args.hidden_size,
        vocab_size=args.vocab_size,
        padded_vocab_size=get("padded_vocab_size") or 0,
        has_tied_embeddings=not get("untie_embeddings_and_output_weights"),
        ffn_hidden_size=get("ffn_hidden_size") or 0,
        is_gated=bool(get("swiglu") or get("quick_geglu")),
        has_bias=bool(get("add_bias_linear")),
        has_centered_norms=bool(get("apply_layernorm_1p")),
        norm_params=2 if get("normalization") == "LayerNorm" else 1,
        post_norms=bool(get("post_self_attn_layernorm")) + bool(get("post_mlp_layernorm")),
        learned_positions=args.max_position_embeddings if has_positions else 0,
        attention=attention,
        num_attention_heads=heads,
        num_query_groups=groups or heads,
        head_dim=get("kv_channels") or args.hidden_size // heads,
        has_qkv_bias=bool(get("add_qkv_bias")),
        has_sinks=get("softmax_type") == "learnable",
        has_qk_norm=bool(get("qk_layernorm")),
        has_output_gate=bool(get("attention_output_gate")),
        q_lora=get("q_lora_rank"),
        kv_lora=get("kv_lora_rank") or 0,
        qk_dim=get("qk_head_dim") or 0,
        rope_dim=get("qk_pos_emb_head_dim") or 64,
        v_dim=get("v_head_dim") or 0,
        index_heads=get("dsa_indexer_n_heads") or 0,
        index_head_dim=get("dsa_indexer_head_dim") or 128,
        index_topk=get("dsa_indexer_topk") or 0,
        **_linear_sizes(args),
        **_expert_sizes(args),
        num_mtp_layers=get("mtp_num_layers") or 0,
        trains_mtp=bool(get("enable_mtp_training")),
        tower=TowerDims(**sizes) if (sizes := get("tower_dims")) else None,
    )
    return dims if family is None else replace(dims, **family.dims(dims, hf_config))


def _expert_sizes(args: Namespace) -> dict[str, Any]:
    """Return the fields that describe the layers with experts: which they are, and their sizes."""
    get = vars(args).get
    if not get("num_experts"):
        return {"is_moe": (False,) * args.num_layers}
    return {
        "is_moe": moe_layers(get("moe_layer_freq", 1), args.num_layers),
        "num_experts": args.num_experts,
        "topk": get("moe_router_topk") or 0,
        "expert_ffn": get("moe_ffn_hidden_size") or get("ffn_hidden_size") or 0,
        "shared_ffn": get("moe_shared_expert_intermediate_size") or 0,
        "has_shared_gate": bool(get("moe_shared_expert_gate")),
    }


def _linear_sizes(args: Namespace) -> dict[str, Any]:
    """Return the fields that describe the layers with linear attention: which they are, and their sizes."""
    get = vars(args).get
    if not get("linear_attention_freq"):
        return {}
    return {
        "is_linear": linear_layers(args.linear_attention_freq, args.num_layers),
        "linear_key_heads": args.linear_num_key_heads,
        "linear_value_heads": args.linear_num_value_heads,
        "linear_key_dim": args.linear_key_head_dim,
        "linear_value_dim": args.linear_value_head_dim,
        "linear_conv": get("linear_conv_kernel_dim") or 4,
    }


def moe_layers(frequency: int | Sequence[int], num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has experts: every n-th, starting with the first, or as the list says."""
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(num_layers))
    return tuple(bool(entry) for entry in frequency)


def linear_layers(frequency: int | Sequence[int] | None, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether its attention is linear: all but every n-th, or as the list says."""
    if frequency is None:
        return (False,) * num_layers
    if isinstance(frequency, int):
        return tuple((layer + 1) % frequency != 0 for layer in range(num_layers))
    return tuple(bool(entry) for entry in frequency)


def schedule_config(args: Namespace, parallel: Mapping[str, int]) -> ScheduleConfig:
    """Return the packing that the flags request, for a trainer that reports these sizes (``get_parallel_config``)."""
    from slime.train_data.schedule import ScheduleConfig

    batch = BatchConfig.of(args)
    is_balanced = batch.balance_data or batch.balance_by_flops
    return ScheduleConfig(
        dp_size=parallel["dp_size"],
        cp_size=parallel.get("cp_size", 1),
        vpp_size=parallel.get("vpp_size") or 1,
        microbatch_group_size_per_vp_stage=parallel.get("microbatch_group_size_per_vp_stage") or 1,
        use_dynamic_batch_size=batch.use_dynamic_batch_size,
        max_tokens_per_gpu=batch.max_tokens_per_gpu,
        micro_batch_size=batch.micro_batch_size,
        balance_data=batch.balance_data,
        balance_by_flops=batch.balance_by_flops,
        flops=model_dims(args) if is_balanced else None,
    )
