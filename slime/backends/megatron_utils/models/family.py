"""The description of a model family: everything about it that other parts of slime need to know."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.backends.megatron_utils.models.flag_rules import (
    DECODER,
    PLAIN,
    Config,
    Flag,
    FlagRule,
    facts,
    shared_rules,
)
from slime.backends.megatron_utils.models.rule import WeightMap
from slime.train_data.model_dims import ModelDims
from slime.utils.files import language_config

BLOCK_FP8: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
"""``quantization_config`` of checkpoints published in block-wise FP8."""


EXPERT_COUNTS = frozenset({"num_experts", "n_routed_experts", "num_local_experts"})
"""Keys of config.json for the number of experts."""
FLOAT_TOLERANCE = 1e-6
"""Relative; config.json may hold an fp32 number with all its digits."""


def differs(expected: Any, actual: Any) -> bool:
    """Return True for unequal values; floats may differ by rounding (1e-05 and its nearest fp32 number)."""
    if isinstance(expected, float) or isinstance(actual, float):
        return not math.isclose(expected, actual, rel_tol=FLOAT_TOLERANCE)
    return bool(expected != actual)


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """A model family; a file or a folder of ``slime_plugins.models`` declares it in ``FAMILIES``.

    It imports neither Megatron nor SGLang, because plans, flags and the checks of engines read it too.
    """

    model_types: tuple[str, ...]
    """Model types in config.json; also the values of ``--model-name``."""
    weight_map: WeightMap

    # --- layers
    spec: str = ""
    """Module and function of its layers, as for ``--spec``; empty if the model flags describe the layers."""
    is_spec_optional: bool = False
    """The model flags describe the layers; ``spec`` exists for commands that name it."""
    dims: Callable[[ModelDims, Mapping[str, Any] | None], Mapping[str, Any]] = lambda dims, config: {}
    """Gives the fields of ``ModelDims`` that follow from ``spec``; called with those that follow from the flags and,
    where known, config.json.
    """
    other_specs: tuple[str, ...] = ()
    """Other ``--spec`` modules with these layers."""
    sparse_architecture: str = ""
    """For a family whose attention selects keys with an indexer: its entry of ``architectures`` in config.json."""
    has_linear_attention: bool = False
    """Some layers are gated delta nets, and the attention of the others has an output gate."""

    # --- config.json
    always: Mapping[str, Any] = field(default_factory=dict)
    """Attribute of args -> its value in every model of the family; adds to ``DECODER`` or overrides it."""
    config_class: str = ""
    """Model type whose transformers class reads config.json, if transformers has none for the family's own type."""
    spelled_out: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    """Expands short forms in config.json that transformers' class may read differently."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Key of config.json -> its default, for keys that transformers' class does not know."""
    fixed: Mapping[str, Any] = field(default_factory=lambda: PLAIN)
    """Key of config.json -> the only value that these layers support."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Key of config.json -> attribute of args that must be equal, in addition to those shared by all families."""
    flags: FlagRule = lambda config: ()
    """Yields further model flags that config.json implies, and lines on settings that no flag can express."""
    num_experts_key: str = "num_experts"
    """Key of config.json for the number of experts, if the model has any."""
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Folder name of a published checkpoint -> keys of its config.json that a plan needs and the model flags do not
    give."""

    # --- engines
    engine_keys: Mapping[str, str] = field(default_factory=dict)
    """Key of config.json without which SGLang serves another model -> what it does without the key."""
    engine_dtype: str = "float16"
    """Dtype in which SGLang serves an fp32 checkpoint without ``--dtype``."""
    engine_hides_experts: bool = False
    """SGLang's recorder of routed experts does not support the layers of this family (0.5.15.post1)."""

    engine_without_adapters: tuple[str, ...] = ()
    """Last name components of modules for which SGLang does not support adapters in this family."""

    def with_defaults(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``config`` with missing values filled in from ``defaults``."""
        return {**config, **{key: value for key, value in self.defaults.items() if config.get(key) is None}}

    def rules(self, config: Config) -> Iterator[Flag | str]:
        """Yield the model flags that ``config``, defaults included, implies; the last one for an attribute wins."""
        kind = config.get("model_type")
        for attribute, value in {**DECODER, **self.always}.items():
            what = {True: "it", False: "none"}.get(value, value) if isinstance(value, bool) else value
            yield Flag(attribute, value, f"a {kind} has {what}")
        yield from shared_rules(config)
        yield from facts(config, self.sizes)
        for key, value in self.fixed.items():
            if config.get(key) not in (None, value):
                yield f"{key} is {config[key]}; the layers of a {kind} have {value} here"
        own = list(self.flags(config))
        yield from own
        windows = {"sliding_attention", "chunked_attention"} & set(config.get("layer_types") or ())
        if windows and not any(isinstance(flag, Flag) and flag.attribute == "window_size" for flag in own):
            yield f"layer_types has {windows.pop()}; all layers of a {kind} have full attention here"

    def completed(self, config: Config) -> dict[str, Any]:
        """Return the language model's part of config.json as transformers reads it, including defaults of its class.

        The number of experts is under ``num_experts_key``.

        Raises:
            ValueError: the class rejects it.
        """
        from huggingface_hub.errors import StrictDataclassError
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        known = copy.deepcopy(self.spelled_out(config))
        self._count_experts(known.get("text_config") or known)
        kind = self.read_as(str(config.get("model_type")))
        if not kind:
            return self.with_defaults(language_config(known))
        config_class: Any = CONFIG_MAPPING[kind]
        try:
            # transformers saves infinities as objects, because JSON has none.
            whole = config_class.from_dict(config_class._decode_special_floats(known)).to_dict()
        except (StrictDataclassError, LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(
                f"{config_class.__name__} of transformers refuses it: {' '.join(str(error).split())}"
            ) from error
        whole = language_config({**whole, "model_type": config.get("model_type")})
        self._count_experts(whole)
        return self.with_defaults(whole)

    def read_as(self, kind: str) -> str:
        """Return the model type whose transformers class reads a config.json of type ``kind``; "" if there is none.

        Classes that SGLang registers when it is imported do not count.
        """
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        kind = kind if kind in self.model_types else self.model_types[0]
        is_its_own = kind in CONFIG_MAPPING and CONFIG_MAPPING[kind].__module__.startswith("transformers.")
        return kind if is_its_own else self.config_class

    def _count_experts(self, config: dict[str, Any]) -> None:
        """Keep one key for the number of experts; for some families transformers saves several, some unread."""
        counts = [config.pop(key) for key in sorted(EXPERT_COUNTS - {self.num_experts_key}) if key in config]
        if counts and counts[0] is not None:
            config.setdefault(self.num_experts_key, counts[0])

    def is_built_by(self, spec: str) -> bool:
        """Return True if ``spec``, the module of ``--spec``, has this family's layers."""
        module = self.spec.partition(" ")[0]
        names = (module, module.rpartition(".")[0], *self.other_specs)
        return bool(module) and spec in names
