"""Flags of rotary positions against the HF config: plain, Llama 3's scaling, and YaRN (arXiv 2309.00071).

What YaRN needs and the flags do not say comes from the checkpoint's config: Megatron's own defaults (a factor of 40)
would silently bend the positions of a model that was never stretched.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from slime.backends.megatron_utils.flags.config_flags import flag_of
from slime.backends.megatron_utils.models.family import differs
from slime.utils.errors import ConfigError

YARN_DEFAULTS: dict[str, Any] = {
    # attribute of args -> value where neither the flags nor the HF config say anything
    "rotary_scaling_factor": 1.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
_HF_NAMES = {"rotary_scaling_factor": "factor", "yarn_truncate": "truncate"}
_PLAIN_ROPE = (None, "default")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of megatron-core's --use-rope-scaling."""


def hf_rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a config of any age in one dictionary, ``rope_type`` always among them.

    transformers 5 has them under ``rope_parameters``; older configs have a base at the top and the rest, if there is
    any, under ``rope_scaling``.
    """
    nested = config.get("rope_scaling") or config.get("rope_parameters") or {}
    settings = {"rope_theta": config.get("rope_theta"), **nested}
    settings.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    settings["rope_type"] = nested.get("rope_type") or nested.get("type") or "default"
    original = config.get("original_max_position_embeddings") or nested.get("original_max_position_embeddings")
    settings["original_max_position_embeddings"] = original or config.get("max_position_embeddings")
    return settings


def hf_yarn_settings(config: Mapping[str, Any], *, knows_truncate: bool = False) -> dict[str, Any]:
    """Return the values of :data:`YARN_DEFAULTS` that a config asks for; a factor of 1 alone where it has no YaRN.

    Args:
        config: config.json.
        knows_truncate: also ``yarn_truncate``, which latent attention cannot choose.

    Raises:
        ConfigError: its positions are stretched in a way that is not known here.
    """
    settings = hf_rope_settings(config)
    kind = settings["rope_type"]
    if kind in _PLAIN_ROPE:
        return {"rotary_scaling_factor": 1.0}
    where = "--position-embedding-type yarn" if knows_truncate else "multi-latent attention"
    if kind not in ("yarn", "deepseek_yarn"):
        raise ConfigError(
            f"config.json of --hf-checkpoint has rotary positions of type {kind!r}; {where} knows 'default' and "
            "'yarn'."
        )
    for name, allowed in (("attention_factor", (None,)), ("truncate", (True, False) if knows_truncate else (True,))):
        if settings.get(name, allowed[0]) not in allowed:
            raise ConfigError(
                f"config.json of --hf-checkpoint gives YaRN the {name} {settings[name]!r}; {where} derives it from "
                "factor, mscale and mscale_all_dim; remove it from the config if it says the same."
            )
    values = {name: settings.get(_HF_NAMES.get(name, name)) for name in YARN_DEFAULTS}
    if values["rotary_scaling_factor"] is None:
        values["rotary_scaling_factor"] = (
            config["max_position_embeddings"] / values["original_max_position_embeddings"]
        )
    # As transformers reads them: a beta that is absent or 0 is the usual one.
    values = {name: value or YARN_DEFAULTS[name] for name, value in values.items()}
    return values | {"yarn_truncate": settings.get("truncate", True)} if knows_truncate else values


def has_yarn(args: Namespace) -> bool:
    """Return True for positions of type yarn in attention that is not latent."""
    is_chosen = args.position_embedding_type == "yarn" and not args.use_rotary_position_embeddings
    return is_chosen and not args.multi_latent_attention


def derive_rope(args: Namespace, config: dict[str, Any] | None) -> dict[str, Any]:
    """Return the rotary flags that were not given.

    Args:
        args: flags; None where one was not given.
        config: of the HF checkpoint, when there is one.

    Raises:
        ConfigError: YaRN's flags without YaRN, or a config with unknown rotary positions.
    """
    names = [*YARN_DEFAULTS, *(() if args.multi_latent_attention else ("yarn_truncate",))]
    given = {name: vars(args)[name] for name in names if vars(args)[name] is not None}
    if has_yarn(args):
        from_config = hf_yarn_settings(config, knows_truncate=True) if config else {}
        return {**YARN_DEFAULTS, "yarn_truncate": True, **from_config, **given, "rope_type": args.rope_type or "rope"}
    if not args.multi_latent_attention:
        if given:
            name = next(iter(given))
            raise ConfigError(
                f"{flag_of(name)} is {given[name]} without --multi-latent-attention or --position-embedding-type "
                "yarn, where it has no effect; --use-rope-scaling stretches the positions of Llama 3."
            )
        return {"rope_type": args.rope_type or "rope"}
    from_config = hf_yarn_settings(config) if config else {}
    values = {**YARN_DEFAULTS, **from_config, **given}
    kind = args.rope_type or ("yarn" if values["rotary_scaling_factor"] != 1.0 else "rope")
    return {**values, "rope_type": kind}


def yarn_fields(args: Namespace) -> dict[str, Any]:
    """Return what megatron-core's model reads from its config, beside the fields that this has, for YaRN.

    Latent attention has fields of its own.
    """
    if not has_yarn(args):
        return {}
    values = {f"yarn_{name}": vars(args)[name] for name in YARN_DEFAULTS}
    return {**values, "yarn_correction_range_round_to_int": args.yarn_truncate}


def yarn_mismatches(args: Namespace, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each flag of YaRN that differs from ``settings``, those of the HF config."""
    for attribute, value in settings.items():
        actual = vars(args)[attribute]
        if value is not None and actual is not None and differs(value, actual):
            yield f"{flag_of(attribute)} is {actual}; {_HF_NAMES.get(attribute, attribute)} is {value}"


def rotary_mismatches(args: Namespace, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each rotary flag that differs from the HF config; latent attention has checks of its own."""
    settings = hf_rope_settings(config)
    partial = settings["partial_rotary_factor"]
    if partial is not None and differs(partial, args.rotary_percent):
        yield f"--rotary-percent is {args.rotary_percent}; partial_rotary_factor is {partial}"
    kind = settings["rope_type"]
    if has_yarn(args) != (kind == "yarn"):
        yield f"--position-embedding-type is {args.position_embedding_type}; rope_type is {kind}"
    elif kind == "yarn":
        yield from yarn_mismatches(args, hf_yarn_settings(config, knows_truncate=True))
    elif kind == "default":
        if args.use_rope_scaling:
            yield "--use-rope-scaling is given; rope_type is default"
    elif kind == "llama3":
        if not args.use_rope_scaling:
            yield "--use-rope-scaling is not given; rope_type is llama3"
        elif settings.get("factor") is None or differs(settings["factor"], args.rope_scaling_factor):
            yield f"--rope-scaling-factor is {args.rope_scaling_factor}; factor of llama3 is {settings.get('factor')}"
        for name, built_in in _LLAMA3.items():
            if settings.get(name) is None or differs(settings[name], built_in):
                yield f"--use-rope-scaling has {name} {built_in} built in; the config says {settings.get(name)}"
    else:
        yield f"--use-rope-scaling knows positions of type llama3 only; rope_type is {kind}"
