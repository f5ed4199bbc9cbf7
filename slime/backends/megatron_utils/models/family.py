"""The description of a model family: what it does not share with the others, for every part of slime that asks."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.backends.megatron_utils.models.flag_rules import (
    CLASS_DEFAULTS,
    DECODER,
    PLAIN,
    Config,
    Flag,
    FlagRule,
    facts,
    shared_rules,
)
from slime.backends.megatron_utils.models.rule import WeightMap

BLOCK_FP8: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
"""``quantization_config`` of checkpoints that are published in FP8 by blocks."""


EXPERT_COUNTS = frozenset({"num_experts", "n_routed_experts", "num_local_experts"})
"""Keys of config.json for the number of experts."""
FLOAT_TOLERANCE = 1e-6
"""Relative: config.json may hold an fp32 number with all its digits."""


def differs(expected: Any, actual: Any) -> bool:
    """Return True for values that are not equal; floats may differ by rounding (1e-05 and its nearest fp32 number)."""
    if isinstance(expected, float) or isinstance(actual, float):
        return not math.isclose(expected, actual, rel_tol=FLOAT_TOLERANCE)
    return bool(expected != actual)


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """A model family; a file or a folder of this package declares it in ``FAMILIES``.

    Nothing here imports Megatron or SGLang: plan, flags and the checks of the engines read it too.
    """

    model_types: tuple[str, ...]
    """Of config.json; also what weights are pushed for (``--model-name``)."""
    weight_map: WeightMap

    # --- layers of its own
    spec: str = ""
    """Module and function of its layers, as ``--spec`` takes them; empty where the model flags describe the layers."""
    is_spec_optional: bool = False
    """The model flags describe the layers, and ``spec`` is there for commands that name it."""
    dims: Callable[[Namespace, Mapping[str, Any] | None], Mapping[str, Any]] = lambda args, config: {}
    """Gives the fields of ``ModelDims`` that follow from ``spec``; called with args and, where known, config.json."""
    tower_parameters: Callable[[Mapping[str, Any]], int] | None = None
    """``vision_config`` of config.json -> parameters of the vision tower that the trainer has."""
    tower_ffn_key: str = "intermediate_size"
    """Key of ``vision_config`` for the width of the MLPs in the tower's blocks."""
    tower_spec: str = ""
    """Another ``spec``, which asks for the vision tower; without one, every model of the family has its tower."""
    rotary_section: tuple[int, int, int] = (24, 20, 20)
    """Frequencies that turn by time, height and width, where config.json does not say (``mrope_section``)."""
    has_interleaved_axes: bool = True
    """The three axes take turns among the frequencies; otherwise each has a run of them."""
    sparse_architecture: str = ""
    """Entry of ``architectures`` in config.json, of a family whose attention chooses keys with an indexer."""
    has_linear_attention: bool = False
    """Some layers are gated delta nets, and the attention of the others has an output gate."""

    # --- config.json
    always: Mapping[str, Any] = field(default_factory=dict)
    """Attribute of args -> the value that every model of the family has, beside ``DECODER``, or instead."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Key of config.json -> the value that a file without it means."""
    class_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The same for a run without model flags: what transformers' class takes, beside ``CLASS_DEFAULTS``."""
    fixed: Mapping[str, Any] = field(default_factory=lambda: PLAIN)
    """Key of config.json -> the one value that these layers can have."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Key of config.json -> attribute of args that must be equal, beside those that all families share."""
    flags: FlagRule = lambda config: ()
    """Yields what else config.json says of the model flags, and lines on what no flag can say."""
    num_experts_key: str = "num_experts"
    """Key of config.json by which the model counts its experts, where it has any."""
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Folder name of a published checkpoint -> keys of its config.json that a plan needs and the model flags do not
    give."""

    # --- engines
    engine_keys: Mapping[str, str] = field(default_factory=dict)
    """Key of config.json without which SGLang serves another model -> what it does without it."""
    engine_hides_experts: bool = False
    """SGLang's recorder of routed experts does not know the layers of this family (0.5.15.post1)."""

    engine_without_adapters: tuple[str, ...] = ()
    """Last names of modules on which SGLang serves this family no adapters, though it does others."""

    def with_defaults(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``config`` with ``defaults`` where it has no value."""
        return {**self.defaults, **{key: value for key, value in config.items() if value is not None}}

    def rules(self, config: Config) -> Iterator[Flag | str]:
        """Yield what ``config``, defaults included, says of the model flags; the last for an attribute counts."""
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

    def completed(self, config: Config, *, is_alone: bool) -> dict[str, Any]:
        """Return :meth:`with_defaults`, with the number of experts under the key of the family.

        Args:
            config: config.json.
            is_alone: no flag says what the model is, so that transformers' defaults count as well.
        """
        absent = {**CLASS_DEFAULTS, **self.class_defaults} if is_alone else {}
        config = {**config, **absent, **self.with_defaults(config)}
        # transformers saves several counts for some families, and what a model does not read may be a default.
        counts = [config.pop(key) for key in sorted(EXPERT_COUNTS - {self.num_experts_key}) if key in config]
        if counts and counts[0] is not None:
            config.setdefault(self.num_experts_key, counts[0])
        return config

    def is_built_by(self, spec: str) -> bool:
        """Return True when ``spec``, the module that ``--spec`` names, has this family's layers."""
        module = self.spec.partition(" ")[0]
        names = (module, module.rpartition(".")[0], self.tower_spec.partition(" ")[0])
        return bool(module) and spec in names
