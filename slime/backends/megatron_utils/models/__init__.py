"""The model families, one file each: model types, table of weights, what config.json must agree with.

A file that defines ``FAMILIES`` is registered by being here; nothing else names it.
"""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module

from slime.backends.megatron_utils.models.rule import ModelFamily, WeightMap
from slime.utils.errors import ConfigError


def _load_families() -> dict[str, ModelFamily]:
    """Return the families that the files of this package declare, by model type.

    Raises:
        ConfigError: two files declare one model type.
    """
    families: dict[str, ModelFamily] = {}
    for file in pkgutil.iter_modules(__path__):
        for family in vars(import_module(f"{__name__}.{file.name}")).get("FAMILIES", ()):
            for model_type in family.model_types:
                if model_type in families:
                    raise ConfigError(
                        f"models/{file.name}.py declares the model type {model_type!r}, and so does the family "
                        f"{families[model_type].weight_map.family}; leave it in one of them."
                    )
                families[model_type] = family
    return families


FAMILIES = _load_families()
"""By model_type of config.json."""

MAPS: dict[str, WeightMap] = {model_type: family.weight_map for model_type, family in FAMILIES.items()}
"""The tables of weights, likewise."""


def find_weight_map(model_name: str) -> WeightMap:
    """The table of a model type, an architecture or a config class, in any spelling: ``qwen3``, ``Qwen3Config``.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    key = re.sub(r"[-_]", "", model_name).lower()
    key = key.removesuffix("config").removesuffix("forcausallm")
    known = {model_type.replace("_", ""): weight_map for model_type, weight_map in MAPS.items()}
    if key not in known:
        raise ConfigError(
            f"The model type (--model-name, or config.json of --hf-checkpoint) is {model_name!r}; weights can be "
            f"converted for {', '.join(sorted(MAPS))}. docs/new_model.md says how to add a family."
        )
    return known[key]
