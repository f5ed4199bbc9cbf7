"""Maps Megatron parameters to Hugging Face tensors, with a table that is read in both directions.

A family has a :class:`WeightMap`: a list of rules, each of which composes one Megatron parameter from certain HF
tensors.  Loading merges the tensors and exporting splits the parameter, so the exporter is the loader's inverse by
construction.  Rules shared by several families are in ``slime_plugins.models``.
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
"""More than any published model has; a run may leave out the MTP layers of its checkpoint."""
FP32 = ("norm.weight", "norm.bias", ".router.weight", ".router.bias")
"""Name suffixes of parameters that all layers accept in any precision."""
OUTPUT_LAYER, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter and the HF tensors it is made of."""

    megatron: str
    """Name after its layer's prefix; ``{expert}`` is replaced by the expert's index."""
    hf: tuple[str, ...]
    """Names after the layer's HF prefix."""
    merge: Merge = lambda tensor, shape: tensor
    """(HF tensors in the order of ``hf``, dimensions) -> the whole parameter, before vocabulary padding."""
    split: Split = lambda tensor, shape: (tensor,)
    """The inverse of ``merge``; it only rearranges values."""


@dataclass(frozen=True)
class WeightMap:
    """All parameters of a model family.  Rules with the same HF names are two spellings of one parameter."""

    family: str
    """Name for messages."""
    top: tuple[Rule, ...]
    """Parameters outside of the layers, with whole names on both sides."""
    layer: tuple[Rule, ...]
    """Parameters of a layer, with names after ``decoder.layers.{i}.`` and ``layer_prefix``."""
    mtp: tuple[Rule, ...] = ()
    """Parameters of an MTP layer, with names after ``mtp.layers.{j}.`` and its prefix; ``layer`` covers its
    ``transformer_layer``."""
    layer_prefix: str = "model.layers.{layer}."
    own_mtp_prefix: str = ""
    """HF prefix of an MTP layer, with ``{index}``; empty if MTP layers are numbered after the decoder's, as in most
    families."""
    mtp_layer_prefix: str = ""
    """HF prefix of its ``transformer_layer``, if different from :meth:`mtp_prefix`."""
    mtp_copies: Mapping[str, str] = field(default_factory=dict)
    """Megatron parameter outside of the layers -> its copy in the checkpoint, after ``mtp_prefix``."""
    ignored: tuple[str, ...] = field(default=(r".*rotary_emb\.inv_freq",))
    """Regular expressions of HF tensors that no model needs."""
    untrained: tuple[str, ...] = ()
    """Regular expressions of HF tensors of parts that a trainer may leave out (a vision tower); engines then read
    them from ``--hf-checkpoint``, and exports copy them from there."""
    spare: tuple[str, ...] = ()
    """Regular expressions of HF tensors that a layer may leave out; they then stay as they are in
    ``--hf-checkpoint``."""
    engine_fp32: tuple[str, ...] = ()
    """Name suffixes of HF tensors that engines hold in fp32, whatever precision they compute in."""
    computed_in_fp32: tuple[str, ...] = ()
    """Name suffixes of Megatron parameters that the family's layers accept in any precision and use in fp32; a run
    keeps them in fp32 if ``--hf-checkpoint`` does."""
    not_applied: tuple[str, ...] = ()
    """Name suffixes of Megatron weights that layers multiply only with other weights, not with tokens; they cannot
    have adapters."""
    plain_parts: tuple[str, ...] = ()
    """Parts of the names of HF matrices in layers that converters do not quantize: engines hold them in linear layers
    without scales."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Prefix of an optional part outside of the layers, such as a vision tower -> prefix of its HF tensors.  The rest
    of the names is equal."""
    together: tuple[tuple[str, ...], ...] = ()
    """HF modules of one layer whose tensors an engine must receive in one call, if the model has all of them."""

    @cached_property
    def plain(self) -> PlainWeights:
        """Weights that converters do not quantize: those outside of layers, and in MTP layers outside of the
        transformer layer.
        """
        from slime.weights.quantize.formats import PlainWeights

        names = (name for rule in (*self.top, *self.mtp) for name in rule.hf)
        parts = (re.escape(prefix) + ".+" for prefix in self.parts.values())
        return PlainWeights((*self.plain_parts, *names, *self.mtp_copies.values()), (*self.untrained, *parts))

    def mtp_prefix(self, index: int, shape: ModelDims) -> str:
        """Return the prefix of an MTP layer's HF tensors."""
        return self.own_mtp_prefix.format(index=index) or self.layer_prefix.format(layer=shape.num_layers + index)

    def together_with(self, hf_name: str, shape: ModelDims) -> tuple[str, ...]:
        """Return the HF tensors that must be sent in one call, including this one; empty if it may be sent alone."""
        for modules in self.together if shape.has_query_latent else ():
            for module in modules:
                prefix, found, rest = hf_name.partition(f".{module}.")
                if found:
                    return tuple(f"{prefix}.{member}.{rest}" for member in modules)
        return ()

    def copies_of(self, name: str, shape: ModelDims) -> tuple[str, ...]:
        """Return the HF names of further copies of a Megatron parameter that a checkpoint may have in MTP layers."""
        if name not in self.mtp_copies:
            return ()
        return tuple(self.mtp_prefix(index, shape) + self.mtp_copies[name] for index in range(shape.num_mtp_layers))

    def is_untrained(self, hf_name: str) -> bool:
        """Return True for a HF tensor of a part that a trainer may leave out."""
        return any(re.fullmatch(pattern, hf_name) for pattern in self.untrained)

    def is_left_out(self, hf_name: str, shape: ModelDims) -> bool:
        """Return True for a HF tensor of a part that this model may leave out: a vision tower, MTP layers."""
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
        """Name prefixes by number of layers and first MTP layer; cached, because a checkpoint has 100,000 names."""
        return {}

    def part_of(self, hf_name: str) -> str | None:
        """Return the name prefix of a HF tensor's part: a layer, MTP layers or one of ``parts``; None for others."""
        if layer := self._layer.match(hf_name):
            return layer[0]
        mtp = (self.own_mtp_prefix.format(index=index) for index in range(MAX_MTP_LAYERS))
        return next((prefix for prefix in (*self.parts.values(), *mtp) if prefix and hf_name.startswith(prefix)), None)

    def has_place(self, hf_name: str, shape: ModelDims) -> bool:
        """Return False for a HF tensor that belongs to no layer of the model and no other part of the family."""
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
        """Prefix of the names in a layer."""
        return re.compile(r"(\d+)".join(map(re.escape, self.layer_prefix.split("{layer}"))))

    @cached_property
    def _rules(self) -> dict[str, dict[str, Rule]]:
        """The rules of each part, by the parameter's name in it; the first rule for a name wins."""
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
            raise KeyError(f"{name} is not a parameter of the family {self.family}")
        return rule, tuple(prefix + hf_name.replace("{expert}", expert) for hf_name in rule.hf)


def to_hf(weight_map: WeightMap, name: str, tensor: Tensor, shape: ModelDims) -> list[tuple[str, Tensor]]:
    """Return one whole Megatron parameter, without vocabulary padding, as HF tensors (views where possible).

    Empty for an output layer tied to the embedding.

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
        weight_map: the family's table.
        name: global name, with layers and experts counted over the whole model.
        get: returns a HF tensor by name.
        shape: dimensions of the model.

    Raises:
        KeyError: the family has no such parameter, or the checkpoint lacks one of its tensors.
    """
    if name == OUTPUT_LAYER and shape.has_tied_embeddings:
        name = EMBEDDING
    rule, hf_names = weight_map.find(name, shape)
    return rule.merge(*(get(hf_name) for hf_name in hf_names), shape)
