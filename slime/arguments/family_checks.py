"""Checks of the engines' flags that depend on the model family, of which the engines' own package knows nothing."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.backends.megatron_utils.models import family_of
from slime.backends.sglang_utils.arguments import read_config
from slime.utils.errors import ConfigError


def check_engines_of_family(args: Namespace) -> None:
    """Refuse engine flags that do not go with the family of ``--hf-checkpoint``.

    Raises:
        ConfigError: with every flag that does not.
    """
    if args.rollout_external:
        return
    config = read_config(args.hf_checkpoint)
    if problems := [*draft_problems(args, config), *replay_problems(args, config)]:
        raise ConfigError("\n".join(problems))


def draft_problems(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for EAGLE without a layer that drafts or a model that is named.

    Args:
        args: the flags.
        config: the keys of config.json.
    """
    algorithm = args.sglang_speculative_algorithm
    if str(algorithm).upper() not in ("EAGLE", "NEXTN") or args.sglang_speculative_draft_model_path is not None:
        return
    own = any(config.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    family = family_of(config)
    if family is not None and not (family.weight_map.mtp or own):
        yield (
            f"--sglang-speculative-algorithm {algorithm}: the checkpoint, a {config['model_type']}, has no MTP layer "
            "that could draft; name a draft model, --sglang-speculative-draft-model-path, or drop the flag."
        )


def replay_problems(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for experts that the engine cannot give back.

    Args:
        args: the flags.
        config: the keys of config.json.
    """
    family = family_of(config)
    if args.use_rollout_routing_replay and family is not None and family.engine_hides_experts:
        yield (
            f"--use-rollout-routing-replay: the installed SGLang does not say which experts a {config['model_type']} "
            "chose in which layer, and fails or answers those of the last; use --use-routing-replay, which records "
            "them in the trainer."
        )
