"""The correspondence of Megatron's parameters and Hugging Face's tensors, as a table that is read in both directions.

A family is a :class:`WeightMap`: a list of rules, each of which says that one Megatron parameter is made of certain HF
tensors.  Loading merges these, exporting splits it, so that the exporter is the loader's inverse by construction.
Rules that several families share are beside them, in ``slime_plugins.models``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from slime.train_data.model_dims import ModelDims

if TYPE_CHECKING:
    from slime.weights.quantize.formats import PlainWeights

Merge = Callable[..., Tensor]
Split = Callable[[Tensor, ModelDims], Sequence[Tensor]]

_EXPERT = re.compile(r"(.*\bexperts\.linear_fc[12]\.(?:weight|bias))(\d+)")
_HF_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.(.+)")
MAX_MTP_LAYERS = 8
"""More than any published model has; a run may go without those of its checkpoint."""
FP32 = ("norm.weight", "norm.bias", ".router.weight", ".router.bias")
"""Ends of the names of parameters that every layer takes in any precision."""
OUTPUT_LAYER, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter and the HF tensors it is made of."""

    megatron: str
    """Name after the prefix of its layer; ``{expert}`` is replaced by the expert's index."""
    hf: tuple[str, ...]
    """Names after the HF prefix of the layer."""
    merge: Merge = lambda tensor, shape: tensor
    """Called with the HF tensors, in the order of ``hf``, and the dimensions; the whole parameter (before vocabulary
    padding)."""
    split: Split = lambda tensor, shape: (tensor,)
    """The inverse of ``merge``: moves numbers, changes none."""


@dataclass(frozen=True)
class WeightMap:
    """All parameters of a model family.  Rules with the same HF names are two spellings of one parameter."""

    family: str
    """Name for messages."""
    top: tuple[Rule, ...]
    """Outside of the layers; whole names on both sides."""
    layer: tuple[Rule, ...]
    """After ``decoder.layers.{i}.`` and ``layer_prefix``."""
    mtp: tuple[Rule, ...] = ()
    """After ``mtp.layers.{j}.`` and its prefix, beside its ``transformer_layer``, for which ``layer`` serves."""
    layer_prefix: str = "model.layers.{layer}."
    own_mtp_prefix: str = ""
    """Of an MTP layer, with ``{index}``; empty where its number continues the decoder's, as in most families."""
    mtp_layer_prefix: str = ""
    """In front of the tensors of its ``transformer_layer``, where that is not :meth:`mtp_prefix`."""
    mtp_copies: Mapping[str, str] = field(default_factory=dict)
    """Megatron parameter outside of the layers -> its copy in the checkpoint, after ``mtp_prefix``."""
    ignored: tuple[str, ...] = field(default=(r".*rotary_emb\.inv_freq",))
    """Regular expressions of HF tensors that no model needs."""
    untrained: tuple[str, ...] = ()
    """Regular expressions of HF tensors of parts that a trainer may go without (a vision tower); engines then read
    them from ``--hf-checkpoint``, and exports copy them from there."""
    spare: tuple[str, ...] = ()
    """Regular expressions of HF tensors of layers that a layer may go without; one that does leaves them as they are
    in ``--hf-checkpoint``."""
    engine_fp32: tuple[str, ...] = ()
    """Ends of the names of HF tensors that engines hold in fp32, whatever precision they compute in."""
    computed_in_fp32: tuple[str, ...] = ()
    """Ends of the names of Megatron parameters that the family's own layers take in any precision, and compute in
    fp32; a run keeps them in fp32 where ``--hf-checkpoint`` does."""
    not_applied: tuple[str, ...] = ()
    """Ends of the names of Megatron weights that layers multiply with others, never with tokens: no adapters."""
    plain_parts: tuple[str, ...] = ()
    """Parts of the names of HF matrices in layers that converters leave as they are: engines hold them in linear
    layers that take no scale."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Prefix of the parameters of a part beside the layers, such as a tower, that the trainer may have -> prefix of
    its HF tensors, whose names go on alike."""
    together: tuple[tuple[str, ...], ...] = ()
    """HF modules of one layer whose tensors an engine must receive in one call, where the model has all of them."""

    @cached_property
    def plain(self) -> PlainWeights:
        """What converters leave as it is: what is outside of layers, or beside the layer of an MTP layer."""
        from slime.weights.quantize.formats import PlainWeights

        names = (name for rule in (*self.top, *self.mtp) for name in rule.hf)
        parts = (re.escape(prefix) + ".+" for prefix in self.parts.values())
        return PlainWeights((*self.plain_parts, *names, *self.mtp_copies.values()), (*self.untrained, *parts))

    def mtp_prefix(self, index: int, shape: ModelDims) -> str:
        """Return what is in front of the HF tensors of an MTP layer."""
        return self.own_mtp_prefix.format(index=index) or self.layer_prefix.format(layer=shape.num_layers + index)

    def together_with(self, hf_name: str, shape: ModelDims) -> tuple[str, ...]:
        """Return the HF tensors that must travel with this one, itself included; empty for one that travels alone."""
        for modules in self.together if shape.has_query_latent else ():
            for module in modules:
                prefix, found, rest = hf_name.partition(f".{module}.")
                if found:
                    return tuple(f"{prefix}.{member}.{rest}" for member in modules)
        return ()

    def copies_of(self, name: str, shape: ModelDims) -> tuple[str, ...]:
        """Return the HF names under which a checkpoint may hold a Megatron parameter once more, in its MTP layers."""
        if name not in self.mtp_copies:
            return ()
        return tuple(self.mtp_prefix(index, shape) + self.mtp_copies[name] for index in range(shape.num_mtp_layers))

    def is_untrained(self, hf_name: str) -> bool:
        """Return True for a HF tensor of a part that a trainer may go without."""
        return any(re.fullmatch(pattern, hf_name) for pattern in self.untrained)

    def is_left_out(self, hf_name: str, shape: ModelDims) -> bool:
        """Return True for a HF tensor of a part that this model may go without: a vision tower, MTP layers."""
        left_out = (*self.untrained, *self.spare)
        return any(re.fullmatch(pattern, hf_name) for pattern in left_out) or self._is_in_mtp(
            hf_name, shape, first=shape.num_mtp_layers
        )

    def _is_in_mtp(self, hf_name: str, shape: ModelDims, *, first: int = 0) -> bool:
        """Return True for a HF tensor of an MTP layer, counted from ``first``."""
        if not self.mtp or (self.own_mtp_prefix and "{index}" not in self.own_mtp_prefix and first):
            return False
        key = (shape.num_layers, first)
        if key not in self._mtp_prefixes:
            prefixes = [self.mtp_prefix(index, shape) for index in range(first, MAX_MTP_LAYERS)]
            inner = [self.mtp_layer_prefix.format(index=index) for index in range(first, MAX_MTP_LAYERS)]
            self._mtp_prefixes[key] = (*prefixes, *filter(None, inner))
        return hf_name.startswith(self._mtp_prefixes[key])

    @cached_property
    def _mtp_prefixes(self) -> dict[tuple[int, int], tuple[str, ...]]:
        """Beginnings of names, by the layers of the model and the first MTP layer: a checkpoint has 100,000 names."""
        return {}

    def part_of(self, hf_name: str) -> str | None:
        """Return what the names of a HF tensor's part begin with: a layer, MTP layers, ``parts``; else None."""
        if layer := self._layer.match(hf_name):
            return layer[0]
        mtp = (self.own_mtp_prefix.format(index=index) for index in range(MAX_MTP_LAYERS))
        return next((prefix for prefix in (*self.parts.values(), *mtp) if prefix and hf_name.startswith(prefix)), None)

    def has_place(self, hf_name: str, shape: ModelDims) -> bool:
        """Return False for a HF tensor that belongs to no layer of the model, nor to anything else of the family."""
        if hf_name in {name for rule in self.top for name in rule.hf} or self.is_untrained(hf_name):
            return True
        if hf_name.startswith(tuple(self.parts.values())):
            return True
        if any(re.fullmatch(pattern, hf_name) for pattern in self.ignored):
            return True
        if (expert := _HF_EXPERT.search(hf_name)) and int(expert[1]) >= shape.num_experts:
            return False
        if self._is_in_mtp(hf_name, shape):
            return True
        layer = self._layer.match(hf_name)
        return layer is not None and int(layer[1]) < shape.num_layers

    @cached_property
    def _layer(self) -> re.Pattern[str]:
        """What a name in a layer begins with."""
        return re.compile(r"(\d+)".join(map(re.escape, self.layer_prefix.split("{layer}"))))

    @cached_property
    def _rules(self) -> dict[str, dict[str, Rule]]:
        """The rules of each part by the parameter's name in it; of two for one name the first."""
        parts = {"top": self.top, "layer": self.layer, "mtp": self.mtp}
        return {part: {rule.megatron: rule for rule in reversed(rules)} for part, rules in parts.items()}

    def find(self, name: str, shape: ModelDims) -> tuple[Rule, tuple[str, ...]]:
        """Return the rule of a Megatron parameter, and its HF names in full.

        Raises:
            KeyError: the family has no such parameter.
        """
        expert = ""
        for prefix, own in self.parts.items():
            if name.startswith(prefix):
                hf_name = own + name.removeprefix(prefix)
                return Rule(name, (hf_name,)), (hf_name,)
        rest, prefix, part = name, "", "top"
        if match := _LAYER.fullmatch(name):
            rest, prefix, part = match[2], self.layer_prefix.format(layer=match[1]), "layer"
        elif match := _MTP_LAYER.fullmatch(name):
            index, rest, part = int(match[1]), match[2], "mtp"
            prefix = self.mtp_prefix(index, shape)
            if self.mtp and rest.startswith("transformer_layer."):
                rest, part = rest.removeprefix("transformer_layer."), "layer"
                prefix = self.mtp_layer_prefix.format(index=index) or prefix
        if match := _EXPERT.fullmatch(rest):
            rest, expert = match[1] + "{expert}", match[2]
        rule = self._rules[part].get(rest)
        if rule is None:
            raise KeyError(f"{name} is no parameter of the family {self.family}")
        return rule, tuple(prefix + hf_name.replace("{expert}", expert) for hf_name in rule.hf)


def to_hf(weight_map: WeightMap, name: str, tensor: Tensor, shape: ModelDims) -> list[tuple[str, Tensor]]:
    """Return one whole Megatron parameter, vocabulary padding cut off, as HF tensors (views where possible).

    Nothing for an output layer that is the embedding.

    Raises:
        KeyError: the family has no such parameter.
    """
    if name == OUTPUT_LAYER and shape.has_tied_embeddings:
        return []
    rule, hf_names = weight_map.find(name, shape)
    return list(zip(hf_names, rule.split(tensor, shape), strict=True))


def from_hf(weight_map: WeightMap, name: str, get: Callable[[str], Tensor], shape: ModelDims) -> Tensor:
    """Return the whole Megatron parameter ``name``, before vocabulary padding.

    Args:
        weight_map: of the family.
        name: global name, layers and experts counted over the whole model.
        get: gives a HF tensor by name.
        shape: of the model.

    Raises:
        KeyError: the family has no such parameter, or the checkpoint lacks a tensor of it.
    """
    if name == OUTPUT_LAYER and shape.has_tied_embeddings:
        name = EMBEDDING
    rule, hf_names = weight_map.find(name, shape)
    return rule.merge(*(get(hf_name) for hf_name in hf_names), shape)
