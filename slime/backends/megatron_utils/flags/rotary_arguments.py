"""Flags of rotary positions: what YaRN's numbers are where neither the command nor config.json gives them."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.backends.megatron_utils.flags.config_flags import flag_of
from slime.backends.megatron_utils.models.rotary_rules import YARN_DEFAULTS
from slime.utils.errors import ConfigError


def has_yarn(args: Namespace) -> bool:
    """Return True for positions of type yarn in attention that is not latent."""
    is_chosen = args.position_embedding_type == "yarn" and not args.use_rotary_position_embeddings
    return is_chosen and not args.multi_latent_attention


def derive_rope(args: Namespace) -> dict[str, Any]:
    """Return the rotary flags that neither the command nor config.json gave.

    Raises:
        ConfigError: YaRN's flags without YaRN.
    """
    is_yarn, is_latent = has_yarn(args), args.multi_latent_attention
    names = [*YARN_DEFAULTS, *(() if is_latent else ("yarn_truncate",))]
    given = {name: vars(args)[name] for name in names if vars(args)[name] is not None}
    if given and not (is_yarn or is_latent):
        name = next(iter(given))
        raise ConfigError(
            f"{flag_of(name)} is {given[name]} without --multi-latent-attention or --position-embedding-type "
            "yarn, where it has no effect; --use-rope-scaling stretches the positions of Llama 3."
        )
    if not (is_yarn or is_latent):
        return {"rope_type": args.rope_type or "rope"}
    values = {**YARN_DEFAULTS, **({"yarn_truncate": True} if is_yarn else {}), **given}
    is_stretched = is_latent and values["rotary_scaling_factor"] != 1.0
    return {**values, "rope_type": args.rope_type or ("yarn" if is_stretched else "rope")}


def yarn_fields(args: Namespace) -> dict[str, Any]:
    """Return what megatron-core's model reads from its config, beside the fields that this has, for YaRN.

    Latent attention has fields of its own.
    """
    if not has_yarn(args):
        return {}
    values = {f"yarn_{name}": vars(args)[name] for name in YARN_DEFAULTS}
    return {**values, "yarn_correction_range_round_to_int": args.yarn_truncate}
