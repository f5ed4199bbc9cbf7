"""Command-line flags generated from megatron-core's config dataclasses.

Each field of :data:`CONFIG_CLASSES` becomes a flag of the same name with dashes, typed by the field's annotation.
:data:`FLAG_NAMES` has the fields with another name on Megatron's command line, :data:`EXTRA_SPELLINGS` and
:data:`NEGATIVE_SPELLINGS` further spellings, :data:`DEFAULTS` the defaults that differ from the dataclass, and
:data:`NOT_FLAGS` the fields without a flag, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from slime.flags.group import flag_of
from slime.flags.kinds import (
    INT32_MAX,
    any_float,
    any_int,
    byte_count,
    fraction,
    fraction_below_one,
    non_negative_float,
    non_negative_int,
    positive_float,
    positive_int,
)

CONFIG_CLASSES: tuple[type, ...] = (
    TransformerConfig,
    MLATransformerConfig,
    OptimizerConfig,
    DistributedDataParallelConfig,
)
"""A field of several classes becomes one flag, with the default and type of the first class."""

FLAG_NAMES: dict[str, str] = {
    # config field -> attribute of args (Megatron's name); the flag is the same with dashes
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "gated_linear_unit": "swiglu",
    "bias_activation_fusion": "bias_swiglu_fusion",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "check_for_nan_in_grad": "check_for_nan_in_loss_and_grad",
    "bucket_size": "ddp_bucket_size",
    "average_in_collective": "ddp_average_in_collective",
    "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
}

EXTRA_SPELLINGS: dict[str, tuple[str, ...]] = {
    "fp8": ("--fp8-format",),
    "microbatch_group_size_per_vp_stage": ("--microbatch-group-size-per-virtual-pipeline-stage",),
}
"""Attribute -> further option strings of the same flag."""

NEGATIVE_SPELLINGS: dict[str, tuple[str, ...]] = {
    "add_bias_linear": ("--disable-bias-linear",),
    "apply_rope_fusion": ("--no-rope-fusion",),
    "overlap_p2p_comm": ("--no-overlap-p2p-communication",),
    "perform_initialization": ("--no-initialization",),
    "barrier_with_L1_time": ("--no-barrier-with-level-1-timing",),
}
"""Attribute of a switch -> further option strings that turn it off."""

DEFAULTS: dict[str, Any] = {
    # defaults of Megatron's command line that differ from the dataclass
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "rope_type": None,
    # None: see resolve_arguments
    "rotary_scaling_factor": None,
    "original_max_position_embeddings": None,
    "beta_fast": None,
    "beta_slow": None,
    "mscale": None,
    "mscale_all_dim": None,
    "min_lr": 0.0,
    "check_for_nan_in_loss_and_grad": True,
    "bias_swiglu_fusion": True,
    "bias_dropout_fusion": True,
    "overlap_p2p_comm": True,
    # ours
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "moe_token_dispatcher_type": "alltoall",
    "transformer_impl": "local",
    "optimizer_offload_fraction": 1.0,
    "use_distributed_optimizer": True,
}
"""Attribute -> default.  Dropout is off because a policy's log-probs must not be random."""

HELP: dict[str, str] = {
    **dict.fromkeys(
        ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        "Layers of that stage; none: as many as the others, also where a recipe has given a number.",
    ),
    "optimizer": "There is adam alone, with decoupled weight decay (AdamW).",
}
"""Attribute -> text appended to its flag's help."""

_SIZES = """
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
    expert_tensor_parallel_size virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank
    num_layers_per_virtual_pipeline_stage decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
    microbatch_group_size_per_vp_stage hierarchical_context_parallel_sizes num_distributed_optimizer_instances
    ffn_hidden_size num_query_groups kv_channels vocab_size seq_length
    make_vocab_size_divisible_by max_position_embeddings original_max_position_embeddings
    recompute_num_layers moe_ffn_hidden_size q_lora_rank kv_lora_rank qk_head_dim v_head_dim dsa_indexer_n_heads
    dsa_indexer_head_dim dsa_indexer_topk linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
    linear_num_key_heads linear_num_value_heads lr_decay_iters lr_wsd_decay_iters
""".split()
_FACTORS = "rotary_base rotary_seq_len_interpolation_factor rope_scaling_factor softmax_scale".split()
_PROBABILITIES = "hidden_dropout attention_dropout rotary_percent optimizer_offload_fraction".split()
_MOMENTS = "adam_beta1 adam_beta2 lr_warmup_fraction".split()

RANGES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(_SIZES, positive_int),
    **dict.fromkeys(_FACTORS, positive_float),
    **dict.fromkeys(_PROBABILITIES, fraction),
    **dict.fromkeys(_MOMENTS, fraction_below_one),
    **dict.fromkeys(("ddp_bucket_size", "min_offloaded_tensor_size"), byte_count),
    "fp8_margin": any_int,
    "glu_linear_offset": any_float,
}
"""Attribute -> type of its flag; numbers not listed here must be 0 or more."""

_WITHOUT_SIGN: dict[type, Callable[[str], Any]] = {int: non_negative_int, float: non_negative_float}

_TRANSFORMER_ENGINE = "it belongs to TransformerEngine's layers, which slime does not have"

NOT_FLAGS: dict[str, str] = {
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype"), "follows --bf16, --fp16 or --fp32"),
    **dict.fromkeys(
        (
            "timers",
            "finalize_model_grads_func",
            "grad_scale_func",
            "no_sync_func",
            "grad_sync_func",
            "param_sync_func",
        ),
        "set by the training step",
    ),
    **dict.fromkeys(
        ("activation_func", "init_method", "output_layer_init_method", "embedding_init_method"),
        "a function; --swiglu and --init-method-std choose it",
    ),
    **dict.fromkeys(("_cpu_offloading_context", "quant_recipe"), "an object"),
    **dict.fromkeys(
        ("calculate_per_token_loss", "clip_grad", "lr", "mtp_num_layers", "mtp_loss_scaling_factor"),
        "a flag of slime's own, see slime.flags.parse",
    ),
    "batch_p2p_comm": "follows --overlap-p2p-comm",
    "deallocate_pipeline_outputs": "always on: a stage's output lives on at the next one",
    "mtp_standalone": "set by megatron-core where an MTP layer has its own stage",
    "variable_seq_lengths": "always on: micro-batches are packed to different lengths",
    "async_tensor_model_parallel_allreduce": "deprecated in megatron-core, without effect",
    "moe_extended_tp": "deprecated in megatron-core, without effect",
    "moe_layer_recompute": "deprecated in megatron-core: --recompute-modules moe",
    "moe_token_dropping": "without effect in megatron-core",
    "decoupled_weight_decay": "Adam is AdamW here",
    **dict.fromkeys(
        (
            *("muon_momentum", "muon_split_qkv", "muon_use_nesterov", "muon_scale_mode", "muon_fp32_matmul_prec"),
            *("muon_num_ns_steps", "muon_tp_mode", "muon_extra_scale_factor", "sgd_momentum"),
        ),
        "the optimizer is Adam",
    ),
    "is_hybrid_model": "Mamba layers",
    **dict.fromkeys((f"mamba_{of}" for of in ("state_dim", "head_dim", "num_groups", "num_heads")), "Mamba layers"),
    "use_mamba_mem_eff_path": "Mamba layers",
    **dict.fromkeys(
        (
            "enable_cuda_graph",
            "external_cuda_graph",
            "cuda_graph_impl",
            "cuda_graph_scope",
            "cuda_graph_warmup_steps",
            "cuda_graph_use_single_mempool",
            "cuda_graph_retain_backward_graph",
        ),
        "CUDA graphs need fixed shapes; micro-batches are packed to different lengths",
    ),
    **dict.fromkeys(("heterogeneous_block_specs", "hetereogenous_dist_checkpoint"), "set by --spec where it applies"),
    **dict.fromkeys(
        (
            "flash_decode",
            "inference_rng_tracker",
            "inference_sampling_seed",
            "use_inference_optimized_layers",
            "inference_fuse_tp_communication",
            "mlp_chunks_for_prefill",
            "symmetric_ar_type",
            "cache_mla_latents",
        ),
        "inference; SGLang generates here",
    ),
    **dict.fromkeys(
        (
            "use_megatron_fsdp",
            "use_custom_fsdp",
            "data_parallel_sharding_strategy",
            "outer_dp_sharding_strategy",
            "fsdp_double_buffer",
            "fsdp_manual_registration",
            "preserve_fp32_weights",
            "suggested_communication_unit_size",
            "keep_fp8_transpose_cache",
        ),
        "Megatron-FSDP; the distributed optimizer shards here",
    ),
    **dict.fromkeys(
        (
            *("fp8_wgrad", "fp8_quantizer_factory", "fp4", "fp4_param", "fp4_quantizer_factory"),
            *("use_kitchen", "use_kitchen_attention", "kitchen_attention_backend"),
            *("disable_parameter_transpose_cache", "reuse_grad_buf_for_mxfp8_param_ag"),
            *("moe_router_padding_for_quantization", "moe_router_padding_for_fp8"),
        ),
        _TRANSFORMER_ENGINE,
    ),
    **dict.fromkeys(
        (
            *("cpu_offloading", "cpu_offloading_num_layers", "cpu_offloading_activations", "cpu_offloading_weights"),
            *("cpu_offloading_double_buffering", "fine_grained_activation_offloading", "offload_modules"),
            "min_offloaded_tensor_size",
        ),
        "offloading of activations needs TransformerEngine's layers; use --recompute-granularity",
    ),
    **dict.fromkeys(
        (
            *("delay_wgrad_compute", "ep_overlap_early_attn_memory_release", "defer_embedding_wgrad_compute"),
            "wgrad_deferral_limit",
        ),
        "delayed weight gradients need TransformerEngine's layers",
    ),
    **dict.fromkeys(("qk_clip_alpha", "qk_clip_threshold"), "packed attention does not clip its logits"),
    **dict.fromkeys(
        ("max_seqlen_per_dp_cp_rank", "hybrid_context_parallel"),
        "micro-batches are packed by --max-tokens-per-gpu, for one context-parallel size",
    ),
    "pipeline_model_parallel_comm_backend": "pipeline stages use the backend of all other groups",
    "num_microbatches_with_partial_activation_checkpoints": "a layer recomputes in every micro-batch or in none; "
    "--recompute-method block with --recompute-num-layers chooses the layers",
    "overlap_moe_expert_parallel_comm": "its schedule takes layers of TransformerEngine apart",
    "use_ring_exchange_p2p": "it needs a torch of NVIDIA's own",
    "apply_residual_connection_post_layernorm": "the layers take the residual before the norm",
    **dict.fromkeys(
        ("experimental_attention_variant", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"),
        "it is megatron-core's experiment; families with such attention have it in --spec, with an indexer that is "
        "not trained",
    ),
    "qk_l2_norm": "there is no such norm of queries and keys; --qk-layernorm is the learned one",
    "apply_query_key_layer_scaling": "packed attention scales all layers alike",
    "disable_bf16_reduced_precision_matmul": "nobody acts on it",
    "init_model_with_meta_device": "parameters are made where they stay",
    "use_fused_weighted_squared_relu": "experts are gated by SiLU or GELU",
    "batch_invariant_mode": "there are no batch-invariant kernels here",
    "moe_enable_routing_replay": "slime has its own: --use-routing-replay",
    "moe_per_layer_logging": "the balancing losses are not logged by layer",
    "moe_latent_size": "experts work on the whole hidden size",
    "log_num_zeros_in_grad": "zeros are not counted",
    "gradient_reduce_div_fusion": "it is a choice of Megatron-FSDP",
}
"""Field -> why it has no flag; a command that gives it gets this reason as the error."""


def switched_off(attribute: str) -> str:
    """Return the flag that turns a switch off: Megatron's spelling if it has one, else ``--no-x``."""
    return NEGATIVE_SPELLINGS.get(attribute, ("--no-" + attribute.replace("_", "-"),))[0]


def config_fields(config_class: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """Yield the init fields of a config dataclass with their resolved annotations."""
    annotations = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if field.init:
            yield field, annotations[field.name]


def attribute_of(field_name: str) -> str:
    """Return the attribute of ``args`` that holds a config field."""
    return FLAG_NAMES.get(field_name, field_name)


def reasons() -> dict[str, str]:
    """Return, for each spelling of the fields in :data:`NOT_FLAGS`, why it is not a flag."""
    found: dict[str, str] = {}
    for name, reason in NOT_FLAGS.items():
        flag = flag_of(attribute_of(name))
        found |= {flag: reason, "--no-" + flag.removeprefix("--"): reason}
    return found


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of the config classes; skip option strings that ``parser`` already has."""
    for config_class in CONFIG_CLASSES:
        group = parser.add_argument_group(f"megatron-core {config_class.__name__}")
        for field, annotation in config_fields(config_class):
            if field.name not in NOT_FLAGS:
                add_config_flag(parser, group, field, annotation, f"{config_class.__name__}.{field.name}")


def add_config_flag(
    parser: argparse.ArgumentParser,
    group: Any,
    field: dataclasses.Field[Any],
    annotation: Any,
    target: str,
) -> None:
    """Add the flag (and its other spellings) of one field."""
    attribute = attribute_of(field.name)
    options = [flag_of(attribute), *EXTRA_SPELLINGS.get(attribute, ())]
    default = DEFAULTS.get(attribute, default_of(field))
    if is_switch(annotation):
        negatives = ["--no-" + option.removeprefix("--") for option in options]
        negatives += NEGATIVE_SPELLINGS.get(attribute, ())
        add_unless_present(
            parser, group, options, dest=attribute, action="store_true", default=default, help=f"Sets {target}."
        )
        add_unless_present(
            parser,
            group,
            negatives,
            dest=attribute,
            action="store_false",
            default=default,
            help=f"Sets {target} to False.",
        )
        return
    text = " ".join((f"Sets {target}.", *([HELP[attribute]] if attribute in HELP else [])))
    add_unless_present(parser, group, options, dest=attribute, default=default, help=text, **value_kind(annotation))


def add_unless_present(parser: argparse.ArgumentParser, group: Any, options: list[str], **settings: Any) -> None:
    """Call ``add_argument`` with those of ``options`` that the parser does not have yet; limit numbers to a range."""
    missing = [option for option in options if option not in parser._option_string_actions]
    if missing:
        if settings.get("type") in (int, float):
            attribute = settings.get("dest") or options[0].lstrip("-").replace("-", "_")
            settings["type"] = RANGES.get(attribute, _WITHOUT_SIGN[settings["type"]])
        group.add_argument(*missing, **settings)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a dataclass field; for an enum member, its name."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if isinstance(field.default, enum.Enum):
        return field.default.name
    return None if field.default is dataclasses.MISSING else field.default


def is_switch(annotation: Any) -> bool:
    """Return True if a field is a bool, or an optional bool."""
    return set(_alternatives(annotation)) == {bool}


def value_kind(annotation: Any) -> dict[str, Any]:
    """Return ``type``, ``choices``, ``nargs`` and ``action`` for a flag with this annotation."""
    kinds = _alternatives(annotation)
    lists = [kind for kind in kinds if typing.get_origin(kind) is list]
    plain = [kind for kind in kinds if kind in (int, float, str)]
    if lists and plain == [int]:
        return {"type": layer_pattern}
    if lists:
        element = typing.get_args(lists[0])[0]
        return {"type": element, "nargs": "+", "action": OneOrMany if plain else "store"}
    if len(kinds) > 1 and str in plain:
        return {"type": str}
    kind = kinds[0]
    if typing.get_origin(kind) is tuple:
        return {"type": int_pair}
    if typing.get_origin(kind) is typing.Literal:
        return {"choices": list(typing.get_args(kind))}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        # The name, not the member: args are sent to processes that cannot import megatron-core.
        return {"choices": list(kind.__members__)}
    if kind is torch.dtype:
        return {"type": torch_dtype}
    if kind in (int, float, str):
        return {"type": kind}
    raise TypeError(f"no flag can be made for a field of type {annotation!r}; add it to NOT_FLAGS with the reason")


def _alternatives(annotation: Any) -> list[Any]:
    """Return the members of a Union without None; the annotation itself otherwise."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    return [annotation]


class OneOrMany(argparse.Action):
    """Stores one value as it is, several as a list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store ``values``."""
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def int_pair(text: str) -> tuple[int, int]:
    """Return two integers, ``128,0`` or ``(128, 0)``."""
    first, separator, second = text.strip("()[] ").partition(",")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not two integers such as 128,0")
    return any_int(first), any_int(second)


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def torch_dtype(text: str) -> torch.dtype:
    """Return the dtype of fp32, bf16 or fp16."""
    if text not in _DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[text]


MAX_PATTERN_LENGTH = 10_000


def layer_pattern(text: str) -> int | list[int]:
    """Return one number for all layers, or a list with one per layer, written as Python: ``[0]*3+[1]*75``.

    Only integers, lists, ``+`` and ``*`` are allowed; nothing is executed.
    """
    try:
        value: int | list[int] = _evaluate(ast.parse(text.strip(), mode="eval").body)
        if isinstance(value, int) and value > INT32_MAX:
            raise ValueError(f"a number is at most {INT32_MAX}")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a layer pattern ({error}); write a number or lists such as [0]*3+[1]*75"
        ) from None
    return value


def _evaluate(node: ast.expr) -> Any:
    """Evaluate an expression of non-negative integers and lists of them."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_evaluate(item) for item in node.elts]
        if not all(isinstance(item, int) for item in items):
            raise ValueError("a list holds integers only")
        return items
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.Add, ast.Mult)):
        raise ValueError("only integers, lists, + and * are understood")
    left, right = _evaluate(node.left), _evaluate(node.right)
    num_lists = isinstance(left, list) + isinstance(right, list)
    if isinstance(node.op, ast.Add):
        if num_lists == 1:
            raise ValueError("a list and a number cannot be added")
        return left + right
    if num_lists == 2:
        raise ValueError("two lists cannot be multiplied")
    if num_lists == 1:
        items, times = (left, right) if isinstance(left, list) else (right, left)
        if len(items) * times > MAX_PATTERN_LENGTH:
            raise ValueError(f"a pattern has at most {MAX_PATTERN_LENGTH} entries")
    return left * right


def config_arguments(config_class: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of ``config_class`` from ``values`` (attributes of args)."""
    arguments = {}
    for field, annotation in config_fields(config_class):
        attribute = attribute_of(field.name)
        if attribute in values and field.name not in NOT_FLAGS:
            arguments[field.name] = _to_field(annotation, values[attribute])
    return arguments


def _to_field(annotation: Any, value: Any) -> Any:
    """Convert a value of args to the field's type: an enum member's name to the member."""
    kind = _alternatives(annotation)[0]
    if isinstance(value, str) and isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[value]
    return value
