"""The model flags against the ``config.json`` of ``--hf-checkpoint``.

The file is read as plain JSON: what it does not say is not compared, and no model class has to know it.
"""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.backends.megatron_utils.flags.config_flags import flag_of
from slime.backends.megatron_utils.flags.latent_arguments import (
    latent_mismatches,
    sigmoid_router_mismatches,
)
from slime.backends.megatron_utils.flags.linear_arguments import linear_problems
from slime.backends.megatron_utils.flags.rotary_arguments import rotary_mismatches
from slime.backends.megatron_utils.flags.sparse_arguments import sparse_problems
from slime.backends.megatron_utils.megatron_to_hf.quantization import checkpoint_quantizer
from slime.backends.megatron_utils.models import family_of, find_weight_map
from slime.backends.megatron_utils.models.family import differs
from slime.flags.distillation import trainer_teachers
from slime.utils.errors import ConfigError
from slime.weights.named_tensors import config_dtype
from slime.weights.quantize.formats import BlockFp8

logger = logging.getLogger(__name__)

_SIMPLE = {
    # key of config.json -> attribute of args
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_hidden_layers": "num_layers",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}


_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of config.json with the number of layers of multi-token prediction."""


EXPERT_COUNTS = frozenset({"num_experts", "n_routed_experts", "num_local_experts"})
"""Keys of config.json for the number of experts."""


def read_config_json(path: str) -> dict[str, Any]:
    """Return ``config.json`` of a checkpoint folder, as it is.

    Raises:
        ConfigError: the folder or the file does not exist, or is no JSON object.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(f"--hf-checkpoint is {path!r}; there is no {file}; give a folder with a HF checkpoint.")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}); --hf-checkpoint needs a complete HF checkpoint.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds a {type(config).__name__}; --hf-checkpoint needs a complete HF checkpoint.")
    return config


def read_hf_config(path: str) -> dict[str, Any]:
    """Return ``config.json`` of a checkpoint folder, its ``text_config`` laid over it where there is one.

    Raises:
        ConfigError: as :func:`read_config_json`.
    """
    config = read_config_json(path)
    return {**config, **(config.get("text_config") or {})}


def rope_parameter(config: dict[str, Any], name: str) -> Any:
    """Return a rotary setting, wherever this age of config keeps it; None when it is absent."""
    for holder in (config, config.get("rope_parameters"), config.get("rope_scaling")):
        if isinstance(holder, dict) and holder.get(name) is not None:
            return holder[name]
    return None


def check_hf_config(args: Namespace) -> None:
    """Compare the model flags with the HF config; one error lists all that differ.

    Raises:
        ConfigError: with each flag, its value and the checkpoint's.
    """
    config = _without_other_expert_counts(read_hf_config(args.hf_checkpoint))
    problems = [
        *_mismatches(args, config),
        *attention_mismatches(args, config),
        *softmax_router_mismatches(args, config),
        *latent_mismatches(args, config),
        *sigmoid_router_mismatches(args, config),
        *family_mismatches(args, config),
    ]
    if problems:
        raise ConfigError(
            f"The model flags disagree with {args.hf_checkpoint}/config.json:\n  "
            + "\n  ".join(problems)
            + "\nSource the file of scripts/models that belongs to this checkpoint, or correct these flags."
        )
    for problem in (*sparse_problems(args, config), *linear_problems(args, config)):
        raise ConfigError(problem)
    check_that_weights_can_be_pushed(args, config)


def _without_other_expert_counts(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with that number of experts only which the family's model reads.

    transformers saves several for some families, and what a model does not read may be a default.
    """
    family = family_of(config)
    unread = set() if family is None else EXPERT_COUNTS - {family.num_experts_key}
    return {key: value for key, value in config.items() if key not in unread}


def check_other_models(args: Namespace) -> None:
    """Refuse other Hugging Face folders to load from that hold another model than the flags.

    A Megatron checkpoint is compared when it is loaded (``checkpoints/checkpoint_fit.py``).

    Raises:
        ConfigError: with each flag, its value and the folder's.
    """
    folders = [("load", args.load), ("ref_load", args.ref_load)]
    teacher_flag = "opd_teacher_load" if args.opd_teachers is None else "opd_teachers"
    folders += [(teacher_flag, folder) for folder in trainer_teachers(args).values()]
    for attribute, folder in folders:
        if not folder or folder == args.hf_checkpoint or not (Path(folder) / "config.json").is_file():
            continue
        if problems := _mismatches(args, read_hf_config(folder)):
            flag = "--ref-load" if folder == args.ref_load else flag_of(attribute)  # --load falls back to it
            raise ConfigError(
                f"{flag}: {folder} is another model than that of the flags:\n  "
                + "\n  ".join(problems)
                + f"\nIt must have the shape of --hf-checkpoint {args.hf_checkpoint}; give another folder."
            )


def check_that_weights_can_be_pushed(args: Namespace, config: dict[str, Any]) -> None:
    """Refuse what the first push would find out: no name map for the model, or no way to quantize it.

    Also what none would find out: an engine that is another model.

    Nothing is pushed with ``--debug-train-only``, which the tools set.
    """
    if args.debug_train_only:
        return
    model_name = args.model_name or config.get("model_type")
    if model_name is not None:
        find_weight_map(model_name)
    check_engine_keys(config)
    quantizer = checkpoint_quantizer(args.hf_checkpoint, config.get("quantization_config"), dtype=config_dtype(config))
    if quantizer is not None and not isinstance(quantizer.format, BlockFp8):
        logger.warning(
            "--hf-checkpoint is quantized, and not in FP8 by blocks: SGLang rearranges such weights while it loads "
            "them, and an engine that is not patched to undo that (/post_process_weights) refuses every push, naming "
            "the tensors. tools/convert_hf_to_fp8.py --strategy block makes a checkpoint that needs no patch."
        )


def _mismatches(args: Namespace, config: dict[str, Any]) -> list[str]:
    """Return one line for each flag that differs from the config."""
    problems = []

    def compare(key: str, flag: str, expected: Any, actual: Any) -> None:
        if expected is not None and actual is not None and differs(expected, actual):
            problems.append(f"{flag} is {actual}; {key} is {expected}")

    for key, attribute in _SIMPLE.items():
        compare(key, flag_of(attribute), config.get(key), getattr(args, attribute))
    if not is_all_experts(args):
        compare("intermediate_size", "--ffn-hidden-size", config.get("intermediate_size"), args.ffn_hidden_size)
    compare("num_key_value_heads", "--num-query-groups", _num_key_value_heads(args, config), args.num_query_groups)
    compare("head_dim", "--kv-channels", _head_dim(args, config), args.kv_channels)
    compare("rms_norm_eps", "--norm-epsilon", config.get("rms_norm_eps"), args.norm_epsilon)
    compare("rope_theta", "--rotary-base", rope_parameter(config, "rope_theta"), args.rotary_base)
    vocab_size = config.get("vocab_size")
    if vocab_size is not None and args.vocab_size < vocab_size:
        problems.append(f"--vocab-size is {args.vocab_size}; vocab_size is {vocab_size}, and rows would be lost")
    family = family_of(config)
    complete = family.with_defaults(config) if family is not None else config
    has_mtp = any(complete.get(key) for key in _MTP_KEYS)
    if args.mtp_num_layers and config.get("model_type") and not has_mtp:
        problems.append(f"--mtp-num-layers is {args.mtp_num_layers}; the model has none ({_MTP_KEYS[0]})")
    tied = config.get("tie_word_embeddings")
    if tied is not None and tied == args.untie_embeddings_and_output_weights:
        state = "given" if args.untie_embeddings_and_output_weights else "not given"
        problems.append(f"--untie-embeddings-and-output-weights is {state}; tie_word_embeddings is {tied}")
    return problems


def is_all_experts(args: Namespace) -> bool:
    """Return True when no layer is dense, so that the dense size means nothing."""
    if not args.num_experts:
        return False
    frequency = args.moe_layer_freq
    return frequency == 1 if isinstance(frequency, int) else all(frequency)


def _num_key_value_heads(args: Namespace, config: dict[str, Any]) -> int | None:
    """Return the key heads; latent attention has no such thing."""
    return None if args.multi_latent_attention else config.get("num_key_value_heads")


def _head_dim(args: Namespace, config: dict[str, Any]) -> int | None:
    """Return the width of a head; in latent attention the key means something else."""
    return None if args.multi_latent_attention else config.get("head_dim")


def attention_mismatches(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each flag of attention that differs; latent attention has checks of its own."""
    if args.multi_latent_attention or config.get("kv_lora_rank") is not None:
        return
    yield from rotary_mismatches(args, config)
    for key, flag, given in (
        ("attention_bias", "--add-qkv-bias", args.add_qkv_bias),
        ("use_qk_norm", "--qk-layernorm", args.qk_layernorm),
    ):
        if config.get(key) is not None and bool(config[key]) != given:
            yield f"{flag} is {'given' if given else 'not given'}; {key} is {config[key]}"


def softmax_router_mismatches(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each flag of Qwen's experts that differs."""
    if not args.num_experts or config.get("num_experts") is None:
        return
    for key, flag, given in (
        ("num_experts", "--num-experts", args.num_experts),
        ("num_experts_per_tok", "--moe-router-topk", args.moe_router_topk),
    ):
        if config.get(key) not in (None, given):
            yield f"{flag} is {given}; {key} is {config[key]}"
    is_normalised = config.get("norm_topk_prob")
    if is_normalised is None or args.moe_router_score_function != "softmax" or args.moe_router_topk == 1:
        return
    if is_normalised == args.moe_router_pre_softmax:
        state = "given" if args.moe_router_pre_softmax else "not given"
        yield (
            f"--moe-router-pre-softmax is {state}; norm_topk_prob is {is_normalised} (without the flag, the weights "
            "of the chosen experts add up to 1)"
        )


def family_mismatches(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each flag that differs in what the model's family alone has (``models/``)."""
    family = family_of(config)
    if family is None:
        return
    is_built = family.is_spec_optional or args.spec or args.custom_model_provider_path
    if family.spec and not is_built:
        yield (
            f"--spec is not given; the checkpoint is a {config['model_type']}, which has layers of its own: "
            f"--spec {family.spec}"
        )
    for key, attribute in family.sizes.items():
        if config.get(key) is not None and differs(config[key], vars(args)[attribute]):
            yield f"{flag_of(attribute)} is {vars(args)[attribute]}; {key} is {config[key]}"
    yield from family.mismatches(args, config)


def check_engine_keys(config: dict[str, Any]) -> None:
    """Refuse a config of which SGLang would serve another model, and say nothing.

    transformers does not know these names: a config.json that it wrote for a model built from scratch lacks them.

    Raises:
        ConfigError: with every setting that is missing.
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
