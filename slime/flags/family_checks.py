"""Checks of engine flags against the model family, which the engines' package does not know."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.backends.megatron_utils.models import family_of
from slime.backends.megatron_utils.models.flag_rules import hf_rope_settings
from slime.backends.sglang_utils.arguments import read_config
from slime.utils.errors import ConfigError
from slime.utils.files import language_config


def check_engines_of_family(args: Namespace) -> None:
    """Check the engine flags against the family of ``--hf-checkpoint``.

    Raises:
        ConfigError: lists every flag that does not fit.
    """
    if args.rollout_external:
        return
    config = read_config(args.hf_checkpoint)
    problems = [*yarn_problems(args.sglang_context_length, config)]
    drafter = args.sglang_speculative_draft_model_path
    problems += draft_problems(args.sglang_speculative_algorithm, drafter, config)
    if args.use_rollout_routing_replay:
        problems += replay_problems(config)
    if problems:
        raise ConfigError("\n".join(problems))


def draft_problems(algorithm: str | None, drafter: str | None, config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for EAGLE without an MTP layer or a draft model (``drafter``)."""
    if str(algorithm).upper() not in ("EAGLE", "NEXTN") or drafter is not None:
        return
    own = any(config.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    family = family_of(config)
    if family is not None and not (family.weight_map.mtp or own):
        yield (
            f"--sglang-speculative-algorithm {algorithm}: the checkpoint, a {config['model_type']}, has no MTP layer "
            "that could draft; name a draft model, --sglang-speculative-draft-model-path, or drop the flag."
        )


def yarn_problems(given: int | None, config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for engines that serve positions beyond those that YaRN stretches.

    There SGLang extends its table of rotary angles up to the context length (``given``, or the model's) with
    unstretched angles, so the engine's outputs differ from the trainer's.
    """
    text = language_config(config)
    rope = hf_rope_settings(text)
    original, factor = rope["original_max_position_embeddings"], rope.get("factor")
    if rope["rope_type"] != "yarn" or not original or not factor:
        return
    reach = int(original * factor)
    served = given or text.get("max_position_embeddings") or 0
    if served > reach:
        what = "--sglang-context-length" if given else "max_position_embeddings of config.json"
        yield (
            f"{what} is {served}, and YaRN of config.json stretches {reach} positions (factor {factor:g} of "
            f"original_max_position_embeddings {original}); SGLang serves those behind with other angles than the "
            f"trainer. Give --sglang-context-length {reach}, or correct rope_scaling in config.json."
        )


def replay_problems(config: dict[str, Any]) -> Iterator[str]:
    """Yield a message if the engine cannot return the chosen experts."""
    family = family_of(config)
    if family is not None and family.engine_hides_experts:
        yield (
            f"--use-rollout-routing-replay: the installed SGLang does not say which experts a {config['model_type']} "
            "chose in which layer, and fails or answers those of the last; use --use-routing-replay, which records "
            "them in the trainer."
        )
