"""Fills and checks model flags from the ``config.json`` of ``--hf-checkpoint``, with one table for both directions.

:func:`fill_model_flags` sets the flags that were not given; :func:`check_hf_config` compares those that were.  The
file is read as plain JSON: keys that it does not have are not compared, and no model class is needed.
"""

from __future__ import annotations

import argparse
import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from itertools import groupby
from typing import Any

from slime.backends.megatron_utils.flags.config_flags import add_config_flags, switched_off
from slime.backends.megatron_utils.flags.model_dims import linear_layers, moe_layers
from slime.backends.megatron_utils.flags.own_flags import add_own_flags
from slime.backends.megatron_utils.models import (
    IS_PARTIAL,
    all_families,
    family_of,
    family_of_spec,
    find_weight_map,
)
from slime.backends.megatron_utils.models.family import differs
from slime.backends.megatron_utils.models.flag_rules import YARN_DEFAULTS, Flag, shared_rules
from slime.flags.checkpoint import is_huggingface_folder
from slime.flags.group import flag_of
from slime.utils import env
from slime.utils.errors import ConfigError
from slime.utils.files import COPY_AGAIN, language_config, read_model_config, read_model_type
from slime.weights.named_tensors import config_dtype

logger = logging.getLogger(__name__)

MODEL_FLAGS = frozenset(
    {
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention"),
        *("num_query_groups", "kv_channels", "qk_layernorm", "add_qkv_bias", "add_bias_linear", "vocab_size"),
        *("normalization", "norm_epsilon", "apply_layernorm_1p", "post_self_attn_layernorm", "post_mlp_layernorm"),
        *("swiglu", "quick_geglu", "glu_linear_offset", "activation_func_clamp_value", "softmax_scale"),
        *("softmax_type", "window_size", "window_attn_skip_freq", "attention_output_gate", "mtp_num_layers"),
        *("untie_embeddings_and_output_weights", "position_embedding_type", "rotary_base", "rotary_percent"),
        *("rotary_interleaved", "use_rope_scaling", "rope_scaling_factor", "rope_type", "rotary_scaling_factor"),
        *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "yarn_truncate"),
        *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim"),
        *("v_head_dim", "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "linear_attention_freq"),
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
        *("linear_num_value_heads", "num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk"),
        *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_router_score_function"),
        *("moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk", "moe_router_dtype"),
        *("moe_router_topk_scaling_factor", "moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
        *("moe_router_load_balancing_type", "moe_grouped_gemm", "expert_tensor_parallel_size"),
    }
)
"""Attributes that config.json can decide.  They are None until :func:`fill_model_flags`, unless the command sets them.
"""

FREE_FLAGS = frozenset(
    {
        *("moe_router_dtype", "moe_router_bias_update_rate", "moe_router_load_balancing_type", "moe_grouped_gemm"),
        *("expert_tensor_parallel_size", "mtp_num_layers", "rope_type", *YARN_DEFAULTS),
    }
)
"""Those :data:`MODEL_FLAGS` that may have any value, or are checked elsewhere, if config.json does not have them."""
OF_GROUPED_ATTENTION = frozenset({"num_query_groups", "group_query_attention", "add_qkv_bias"})
"""Attributes that latent attention does not read."""
FIXED_FLAGS = frozenset(
    {
        *("no_rope_freq", "rotary_seq_len_interpolation_factor"),
        *("moe_router_force_load_balancing", "moe_router_topk_limited_devices", "moe_apply_probs_on_input"),
    }
)
"""Attributes that change a model's output, in ways that no config.json of a known family requests."""
_NEUTRAL: Mapping[str, Any] = {
    # attribute -> the value that means the same as None
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 1.0,
    "moe_shared_expert_intermediate_size": 0,
}
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of config.json with the number of layers of multi-token prediction."""


def read_hf_config(path: str, *, flag: str = "--hf-checkpoint") -> dict[str, Any]:
    """Return the language model's part of ``config.json`` as its family reads it, with defaults filled in.

    Args:
        path: folder of the checkpoint.
        flag: the flag that names the folder, for messages.

    Raises:
        ConfigError: the file is missing or damaged, or does not describe a model.
    """
    config = read_model_config(path, flag=flag)
    family = None if config.get(IS_PARTIAL) else family_of({"model_type": read_model_type(path, flag=flag)})
    try:
        return language_config(config) if family is None else family.completed(config)
    except ValueError as error:
        raise ConfigError(f"{flag}: {path}/config.json: {error}. {COPY_AGAIN}") from error


def open_model_flags(parser: argparse.ArgumentParser) -> None:
    """Make the flags of :data:`MODEL_FLAGS` default to None."""
    for action in parser._actions:
        if action.dest in MODEL_FLAGS:
            if action.default is not None and action.nargs != 0:
                action.help = f"{action.help} Default: by config.json, else {action.default}."
            action.default = None


@cache
def _megatron_defaults() -> dict[str, Any]:
    """Return Megatron's defaults, for flags that neither the command line nor a config.json decides."""
    parser = argparse.ArgumentParser()
    add_own_flags(parser)
    add_config_flags(parser)
    known = MODEL_FLAGS | FIXED_FLAGS
    return {action.dest: action.default for action in parser._actions if action.dest in known}


def fill_model_flags(args: Namespace) -> dict[str, Any]:
    """Return the model flags that were not given, from config.json (these are logged) or else Megatron's defaults.

    If ``--num-layers`` is given, the command describes the model, and choices that config.json leaves open are not
    filled in.

    Raises:
        ConfigError: neither the flags nor config.json describe the model, or config.json is of an unknown family.
    """
    missing = [name for name in MODEL_FLAGS if vars(args).get(name) is None]
    filled = {name: default for name, default in _megatron_defaults().items() if name in missing}
    for is_given, attribute, value in (
        # other spellings of model flags
        (args.use_rotary_position_embeddings, "position_embedding_type", "rope"),
        (args.use_gated_attention, "attention_output_gate", True),
    ):
        if is_given:
            missing = [name for name in missing if name != attribute]
            filled[attribute] = value
    if not args.hf_checkpoint:
        return filled
    config = read_hf_config(args.hf_checkpoint)
    family = family_of(config)
    is_alone = args.num_layers is None
    if is_alone and not args.debug_rollout_only:
        if family is None:
            raise ConfigError(_unknown_family(args.hf_checkpoint, config))
        if problems := config_says(config)[1]:
            raise ConfigError(
                f"{args.hf_checkpoint}/config.json asks for what the layers here do not compute:\n  "
                + "\n  ".join(problems)
                + "\nUse another checkpoint; docs/new_model.md says how to add layers."
            )
    said = config_says(config)[0]
    chosen = {name: flag for name, flag in said.items() if name in missing and (flag.is_fact or is_alone)}
    filled |= {name: flag.value for name, flag in chosen.items()}
    if family is not None and family.spec and not (args.spec or args.custom_model_provider_path):
        if not family.is_spec_optional:
            chosen["spec"] = Flag("spec", family.spec.split(), f"the layers of a {config['model_type']}")
            filled["spec"] = chosen["spec"].value
    news = [flag for name, flag in chosen.items() if flag.value != _megatron_defaults().get(name)]
    if news and env.get_int("RANK", 0) == 0:
        lines = [f"{' '.join(words_of(flag.attribute, flag.value)):<48}{flag.source}" for flag in news]
        logger.info("%d model flags follow from %s/config.json.", len(news), args.hf_checkpoint)
        logger.debug("They are:\n  %s", "\n  ".join(lines))
    return filled


def config_says(config: Mapping[str, Any]) -> tuple[dict[str, Flag], list[str]]:
    """Return the model flags that config.json implies, by attribute, and its settings that no flag can express.

    Args:
        config: result of :func:`read_hf_config`.
    """
    family = family_of(config)
    rules = list(shared_rules(config) if family is None else family.rules(family.with_defaults(config)))
    said = {rule.attribute: rule for rule in rules if isinstance(rule, Flag)}
    return said, [rule for rule in rules if isinstance(rule, str)]


def words_of(attribute: str, value: Any) -> list[str]:
    """Return a flag as command-line words: none for a switch that is off, layer lists as ``[0]*3+[1]*58``."""
    if value is False:
        return [switched_off(attribute)] if _megatron_defaults().get(attribute) else []
    if value is True:
        return [flag_of(attribute)]
    if attribute == "window_size":
        return [flag_of(attribute), ",".join(map(str, value))]
    if attribute == "spec":
        return [flag_of(attribute), *value]
    if isinstance(value, list):
        value = "+".join(f"[{entry}]*{len(list(run))}" for entry, run in groupby(value))
    return [flag_of(attribute), str(value)]


def check_hf_config(args: Namespace) -> None:
    """Compare the model flags, all filled in, with the HF config.

    Raises:
        ConfigError: lists every flag that differs, its value and the checkpoint's.
    """
    config = read_hf_config(args.hf_checkpoint)
    if lines := disagreements(args, config):
        raise ConfigError(
            f"The model flags disagree with {args.hf_checkpoint}/config.json:\n  "
            + "\n  ".join(lines)
            + "\nLeave the model flags out, or source the file of scripts/models that belongs to this checkpoint."
        )
    problems = sparse_problems(
        config,
        freezes_indexer=args.freeze_indexer and not (args.spec or args.custom_model_provider_path),
        context_size=args.context_parallel_size,
        has_contiguous_parts=args.allgather_cp,
    )
    for problem in problems:
        raise ConfigError(problem)
    if not args.debug_train_only:  # with it nothing is pushed; the tools set it
        check_that_weights_can_be_pushed(args.hf_checkpoint, args.model_name, config)


def sparse_problems(
    config: dict[str, Any], *, freezes_indexer: bool, context_size: int, has_contiguous_parts: bool
) -> Iterator[str]:
    """Yield conflicts with the HF config: a frozen indexer that the model lacks, a wrong context-parallel layout.

    Args:
        freezes_indexer: ``--freeze-indexer`` is given, and the layers are not the user's own.
        context_size: ``--context-parallel-size``.
        has_contiguous_parts: ``--allgather-cp``.
    """
    family = family_of(config)
    has_indexer = family is not None and bool(family.sparse_architecture)
    if freezes_indexer and not has_indexer:
        yield (
            f"--freeze-indexer: the checkpoint, a {config.get('model_type')}, has no sparse attention and so no "
            "indexer; drop the flag."
        )
    if context_size == 1:
        return
    architectures = config.get("architectures") or []
    sparse = {known.sparse_architecture for known in all_families().values()} - {""}
    is_sparse = not sparse.isdisjoint(architectures)
    if has_contiguous_parts and not is_sparse:
        yield (
            f"--allgather-cp with --context-parallel-size {context_size}: the checkpoint is "
            f"{', '.join(architectures) or 'of unknown architecture'}; only {' and '.join(sorted(sparse))} work "
            "that way; drop --allgather-cp."
        )
    if is_sparse and not has_contiguous_parts:
        yield (
            f"--context-parallel-size is {context_size} without --allgather-cp; the sparse attention of "
            f"{', '.join(architectures)} needs contiguous parts of the stream; give --allgather-cp."
        )


def disagreements(args: Namespace, config: Mapping[str, Any]) -> list[str]:
    """Return one line per flag that differs from the config, and per setting that no flag can express."""
    said, problems = config_says(config)
    flags = [flag for flag in said.values() if flag.is_fact]
    # Layers of a user's --spec may have any flags.
    own_layers = args.custom_model_provider_path or (args.spec and family_of_spec(args.spec) is None)
    if not own_layers and family_of(config) is not None and not config.get(IS_PARTIAL):
        idle = OF_GROUPED_ATTENTION if args.multi_latent_attention else frozenset()
        unsaid = _unsaid(config, idle | said.keys())
        flags += [flag for flag in unsaid if args.num_experts or not flag.attribute.startswith("moe_")]
    width = args.kv_channels or args.hidden_size // args.num_attention_heads
    given = vars(args)
    lines = [
        f"{_as_given(flag.attribute, given[flag.attribute])}; {flag.source}"
        for flag in flags
        if _is_other(flag, given[flag.attribute], head_dim=width, num_layers=args.num_layers)
    ]
    if args.mtp_num_layers and config.get("model_type") and not any(config.get(key) for key in _MTP_KEYS):
        lines.append(f"--mtp-num-layers is {args.mtp_num_layers}; the model has none ({_MTP_KEYS[0]})")
    return lines + problems


def _unsaid(config: Mapping[str, Any], said: AbstractSet[str]) -> list[Flag]:
    """Return the flags, at Megatron's defaults, that change the model's output but are not in its config.json."""
    names = sorted((MODEL_FLAGS | FIXED_FLAGS) - FREE_FLAGS - said)
    source = f"a {config['model_type']} has nothing of the kind"
    return [Flag(name, _megatron_defaults()[name], source) for name in names]


def _is_other(flag: Flag, given: Any, *, head_dim: int, num_layers: int) -> bool:
    """Return True if the given value differs in meaning from the config's."""
    neutral = {**_NEUTRAL, "softmax_scale": head_dim**-0.5, "kv_channels": head_dim}.get(flag.attribute)
    wanted, given = (neutral if value is None else value for value in (flag.value, given))
    if flag.attribute == "vocab_size":
        return bool(given < wanted)  # rows would be lost
    if flag.attribute == "moe_layer_freq" and given is not None:
        given = moe_layers(given, num_layers)
    if flag.attribute == "linear_attention_freq":
        return linear_layers(given, num_layers) != linear_layers(wanted, num_layers)
    if isinstance(wanted, list | tuple) and given is not None:
        return list(wanted) != list(given)
    if isinstance(wanted, bool):
        return wanted != bool(given)
    return wanted is not given if wanted is None or given is None else differs(wanted, given)


def _as_given(attribute: str, value: Any) -> str:
    """Return a flag's value in the words of a message."""
    if isinstance(value, bool):
        if _megatron_defaults().get(attribute) is True:
            return f"{switched_off(attribute)} is {'not given' if value else 'given'}"
        return f"{flag_of(attribute)} is {'given' if value else 'not given'}"
    return f"{flag_of(attribute)} is {value}"


def _unknown_family(folder: str, config: Mapping[str, Any]) -> str:
    return (
        f"--hf-checkpoint {folder} is a {config.get('model_type')!r}, a family unknown here. Where its "
        f"layers are those of a known one, give --model-name NAME and the model flags (--num-layers, ...); "
        f"docs/new_model.md says how to add a family. Known are {', '.join(sorted(all_families()))}."
    )


def check_other_models(args: Namespace) -> None:
    """Check that other Hugging Face folders to load from hold a known model that agrees with the flags.

    Megatron checkpoints are checked when they are loaded (``checkpoints/checkpoint_fit.py``).

    Raises:
        ConfigError: lists each flag that differs, its value and the folder's.
    """
    folders = [("load", args.load), ("ref_load", args.ref_load)]
    folders += [(policy.load_arg, policy.folder) for policy in args.frozen_policies]
    for attribute, folder in folders:
        if not folder or not is_huggingface_folder(folder):
            continue
        flag = "--ref-load" if folder == args.ref_load else flag_of(attribute)  # --load falls back to it
        config = read_hf_config(folder, flag=flag)
        if family_of(config) is None and not config.get(IS_PARTIAL):
            find_weight_map(args.model_name or config["model_type"])
        if folder != args.hf_checkpoint and (problems := disagreements(args, config)):
            raise ConfigError(
                f"{flag}: {folder} is another model than that of the flags:\n  "
                + "\n  ".join(problems)
                + f"\nIt must have the shape of --hf-checkpoint {args.hf_checkpoint}; give another folder."
            )


def check_that_weights_can_be_pushed(folder: str, model_name: str | None, config: dict[str, Any]) -> None:
    """Check early what would fail in the first push: the model's name map and its quantization.

    Also check what no push would detect: a config from which SGLang builds another model.
    """
    if (kind := model_name or config.get("model_type")) is not None:
        find_weight_map(kind)
    check_engine_keys(config)
    if (quantization := config.get("quantization_config")) is not None:
        from slime.backends.megatron_utils.megatron_to_hf import checkpoint_quantizer

        checkpoint_quantizer(folder, quantization, dtype=config_dtype(config))


def check_engine_keys(config: dict[str, Any]) -> None:
    """Reject a config from which SGLang would silently serve another model.

    transformers does not know these keys, so a config.json that it wrote for a model built from scratch lacks them.

    Raises:
        ConfigError: lists every missing setting.
    """
    family = family_of(config)
    if family is None:
        return
    missing = [f"{key} (without it, {what})" for key, what in family.engine_keys.items() if not config.get(key)]
    if missing:
        raise ConfigError(
            f"config.json of --hf-checkpoint is that of a {config['model_type']} and lacks what SGLang builds the "
            "model by: " + "; ".join(missing) + ". Copy these settings from the published config.json."
        )
