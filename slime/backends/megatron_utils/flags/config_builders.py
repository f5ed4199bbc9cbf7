"""Builds megatron-core's config objects from complete flags."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from slime.backends.megatron_utils import cpu_platform
from slime.backends.megatron_utils.flags.config_flags import attribute_of, config_arguments
from slime.backends.megatron_utils.models.flag_rules import YARN_DEFAULTS
from slime.flags.group import flag_of
from slime.utils.errors import ConfigError


def transformer_config_from_args(args: Namespace) -> TransformerConfig:
    """Return the model's TransformerConfig, or its MLATransformerConfig with ``--multi-latent-attention``.

    Raises:
        ConfigError: megatron-core rejects the combination; the message includes its error.
    """
    config_class = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    values = config_arguments(config_class, vars(args))
    values |= {
        "params_dtype": args.params_dtype,
        "pipeline_dtype": torch.float32 if args.fp32_residual_connection else args.params_dtype,
        "autocast_dtype": args.params_dtype,
        # A model transform (low_precision) implements FP8; for megatron-core this field means TransformerEngine's.
        "fp8": None,
        "variable_seq_lengths": True,
        # Outputs are freed while being sent.  CUDA's allocator keeps the memory valid; gloo would send garbage.
        "deallocate_pipeline_outputs": not (args.overlap_p2p_comm and cpu_platform.IS_INSTALLED),
        # With batched sends, two ranks with two virtual stages each would swap their messages.
        "batch_p2p_comm": args.virtual_pipeline_model_parallel_size is None,
        "calculate_per_token_loss": args.calculate_per_token_loss,
        "mtp_num_layers": args.mtp_num_layers or None,
        # Without CUDA there is one generator and one device, so parameters are created in place.
        "use_cpu_initialization": args.use_cpu_initialization or cpu_platform.IS_INSTALLED,
    }
    if args.swiglu and args.quick_geglu:
        raise ConfigError("--swiglu and --quick-geglu are given; an MLP has one activation; leave one of them out.")
    if args.swiglu:
        values["activation_func"] = F.silu
    if args.quick_geglu:
        values |= {"activation_func": quick_gelu, "gated_linear_unit": True}
    if not (args.swiglu or args.quick_geglu or args.add_bias_linear):
        values["bias_activation_fusion"] = False  # on by default, but needs an MLP with a gate or a bias
    layout = values.get("pipeline_model_parallel_layout")
    if args.mtp_num_layers and layout and "m" not in layout:
        # MTP layers precede the loss, even if the layout omits them.
        values["pipeline_model_parallel_layout"] = layout.removesuffix("L") + "m" * args.mtp_num_layers + "L"
    try:
        config = config_class(**values)
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"megatron-core refuses the model or layout flags: {in_words_of_flags(str(error), config_class)} "
            "(docs/flags.md explains them)."
        ) from error
    if has_yarn(args.position_embedding_type, is_latent=args.multi_latent_attention):
        # GPTModel reads these, but no config class declares them; latent attention has its own
        for name in YARN_DEFAULTS:
            setattr(config, f"yarn_{name}", vars(args)[name])
        config.yarn_correction_range_round_to_int = args.yarn_truncate
    if config.mtp_standalone:
        raise ConfigError(
            f"--pipeline-model-parallel-layout is {layout}; MTP layers (m) must be in the last stage, before the loss "
            "(L); leave them out, and they are put there."
        )
    return config


def in_words_of_flags(message: str, config_class: type) -> str:
    """Return megatron-core's message with the names of flags in place of config fields."""
    flags = {field.name: flag_of(attribute_of(field.name)) for field in fields(config_class)}
    return re.sub(r"(?<![\w-])[a-z]+(_[a-z0-9]+)+", lambda match: flags.get(match[0], match[0]), message)


def num_stages_of_layout(layout: str) -> int:
    """Return the number of stages in a ``--pipeline-model-parallel-layout``, including virtual ones."""
    try:
        return len(PipelineParallelLayerLayout.parse_str_to_list(layout))
    except (ValueError, AssertionError, TypeError, KeyError) as error:
        raise ConfigError(
            f"--pipeline-model-parallel-layout {layout!r} cannot be read: {error}; stages are separated by bars, E is "
            "the embedding, t a layer, m an MTP layer, L the loss, as in 'Ett|tttL'."
        ) from error


def optimizer_config_from_args(args: Namespace) -> OptimizerConfig:
    """Return the OptimizerConfig: the kind of optimizer, its hyperparameters, sharding and offload."""
    values = config_arguments(OptimizerConfig, vars(args))
    values |= {"params_dtype": args.params_dtype, "lr": args.lr, "clip_grad": args.clip_grad}
    # megatron-core supports these only with TransformerEngine's FusedAdam; here a transform implements them.
    for name in ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"):
        values.pop(name)
    config = _build(OptimizerConfig, values)
    if config.optimizer_cpu_offload:
        # Keeps master weights only on the host, not also on the GPU, as the precision-aware optimizer does.  Set after
        # construction, because megatron-core's check requires TransformerEngine.
        config.use_precision_aware_optimizer = True
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        config.store_param_remainders = False
    return config


def ddp_config_from_args(args: Namespace) -> DistributedDataParallelConfig:
    """Return the DistributedDataParallelConfig: how gradients are stored and reduced over data-parallel ranks.

    The bucket size defaults to megatron-core's; it matters only with ``--overlap-grad-reduce``.
    """
    values = config_arguments(DistributedDataParallelConfig, vars(args))
    if args.fp16:  # gradients overflow until the loss scale fits; the optimizer skips those steps
        values["check_for_nan_in_grad"] = False
    return _build(DistributedDataParallelConfig, values)


def _build(config_class: type, values: dict[str, Any]) -> Any:
    try:
        return config_class(**values)
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(f"megatron-core's {config_class.__name__} refuses the flags: {error}.") from error


def params_dtype(*, bf16: bool, fp16: bool) -> torch.dtype:
    """Return the dtype of a model's parameters."""
    return torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32


def has_yarn(position_type: str, *, is_latent: bool) -> bool:
    """Return True for rotary positions of type yarn in attention without latents."""
    return position_type == "yarn" and not is_latent
