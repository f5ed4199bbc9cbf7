"""Rotary positions of a config.json of any age: base, turning part, and YaRN (arXiv 2309.00071).

What YaRN needs comes from the checkpoint's config: Megatron's own defaults (a factor of 40) would silently bend the
positions of a model that was never stretched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    if kind == "default":
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
    values = {name: settings.get("factor" if name == "rotary_scaling_factor" else name) for name in YARN_DEFAULTS}
    if values["rotary_scaling_factor"] is None:
        values["rotary_scaling_factor"] = (
            config["max_position_embeddings"] / values["original_max_position_embeddings"]
        )
    # As transformers reads them: a beta that is absent or 0 is the usual one.
    values = {name: value or YARN_DEFAULTS[name] for name, value in values.items()}
    return values | {"yarn_truncate": settings.get("truncate", True)} if knows_truncate else values
