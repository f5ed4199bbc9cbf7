"""The registry of model families, and the classes of their tables.

A file of ``slime_plugins.models``, or ``family.py`` in a folder there, registers its families by defining
``FAMILIES``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.rule import WeightMap
from slime.utils.errors import ConfigError
from slime.utils.files import read_model_type
from slime.weights.family_files import family_files

if TYPE_CHECKING:
    from slime.weights.quantize.formats import PlainWeights

logger = logging.getLogger(__name__)

IS_PARTIAL = "is_partial"
"""Key that marks a partially known config, in which a missing key means nothing."""


def all_families() -> Mapping[str, ModelFamily]:
    """Return all families by the model_type of config.json, except those whose files cannot be imported.

    Raises:
        ConfigError: two files declare one model type.
    """
    return _import_families()[0]


@cache
def _import_families() -> tuple[Mapping[str, ModelFamily], Sequence[str]]:
    """Return the families by model type, and the files that cannot be imported, with their errors."""
    families: dict[str, ModelFamily] = {}
    failures: list[str] = []
    for module, path in family_files("*.py", "*/family.py").items():
        if "\nFAMILIES" not in path.read_text():
            continue  # layers, or code shared by families
        try:
            declared = import_module(module).FAMILIES
        except Exception as error:  # noqa: BLE001 - a third-party family that this run may not need
            failures.append(f"{module} ({type(error).__name__}: {error})")
            logger.warning("The model family %s cannot be used: %s", module, error)
            continue
        for family in declared:
            for model_type in family.model_types:
                if model_type in families:
                    raise ConfigError(
                        f"{module} declares the model type {model_type!r}, and so does the family "
                        f"{families[model_type].weight_map.family}; leave it in one of them."
                    )
                families[model_type] = family
    return families, failures


def family_of(config: Mapping[str, Any]) -> ModelFamily | None:
    """Return the family of a config.json; None for an unknown model type."""
    return all_families().get(str(config.get("model_type")))


def family_of_spec(spec: Sequence[str] | None) -> ModelFamily | None:
    """Return the family whose layers ``--spec`` (module and function) builds; None without it or for a plug-in's."""
    if not spec:
        return None
    return next((family for family in all_families().values() if family.is_built_by(spec[0])), None)


def published_config(checkpoint: str) -> Mapping[str, Any]:
    """Return the known part of a published checkpoint's config.json, by the name of its folder; empty if unknown.

    Recipes name folders of the cluster; on a machine without them, plans use this.
    """
    name = PurePath(checkpoint).name
    known = all_families().values()
    return next((family.published[name] for family in known if name in family.published), {})


def plain_weights(config: Mapping[str, Any]) -> PlainWeights | None:
    """Return which weights of a checkpoint converters do not quantize; None for an unknown model type."""
    family = family_of(config)
    return family.weight_map.plain if family else None


def dtype_of_fp32(config: Mapping[str, Any]) -> str:
    """Return the dtype in which an engine without ``--dtype`` serves an fp32 checkpoint."""
    family = family_of(config)
    return family.engine_dtype if family else "float16"


def family_of_folder(folder: str | Path, model_name: str | None) -> ModelFamily:
    """Return the family whose names are used to read and write a Hugging Face folder.

    As for pushes, it is that of ``--model-name``, or else of the model type in the folder's config.json.

    Raises:
        ConfigError: the family is unknown; the message lists the known ones.
    """
    return find_family(model_name or read_model_type(folder))


def find_weight_map(model_name: str) -> WeightMap:
    """Return the weight map of :func:`find_family`."""
    return find_family(model_name).weight_map


@cache
def find_family(model_name: str) -> ModelFamily:
    """Return the family of a model type, architecture or config class, in any spelling: ``qwen3``, ``Qwen3Config``.

    Raises:
        ConfigError: it is unknown; the message lists the known ones.
    """
    key = _plain(model_name)
    key = key.removesuffix("config").removesuffix("forcausallm").removesuffix("forconditionalgeneration")
    known = {_plain(model_type): family for model_type, family in all_families().items()}
    if key not in known:
        raise ConfigError(
            f"The model type (--model-name, or config.json of --hf-checkpoint) is {model_name!r}; weights can be "
            f"converted for {', '.join(sorted(all_families()))}. docs/new_model.md says how to add a family."
            + "".join(f" It could not be imported: {failure}." for failure in _import_families()[1])
        )
    return known[key]


def _plain(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()
