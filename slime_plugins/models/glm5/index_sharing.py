"""The layers of a sparse-attention model that select keys, and those that share an earlier layer's selection.

Layers are counted from 1, like Megatron's ``layer_number``.  A *computing* layer runs an indexer; a *skip* layer
attends to the keys selected by the nearest computing layer below it.

    freq 4, offset 3, 11 layers:   1 2 3 4 5 6 7 8 9 10 11
    computing                      x x x . . . x . . .  x
    source                         1 2 3 3 3 3 7 7 7 7  11

Plain Python: no tensor, no Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.utils.errors import ConfigError


class PipelineSplitError(ConfigError, AssertionError):
    """A pipeline stage would start with a layer whose keys another stage selects."""


@dataclass(frozen=True, slots=True)
class IndexSharing:
    """The layers that compute an index, and the settings of the HF config that determined them, for messages."""

    is_computing: tuple[bool, ...]
    """One entry per decoder layer."""
    freq: int = 1
    """``index_topk_freq``."""
    offset: int = 2
    """``index_skip_topk_offset``; 2 is the default of transformers' config class and of SGLang."""

    def source(self, layer: int) -> int:
        """Return the layer (from 1) whose selection ``layer`` uses: itself if it computes.

        A layer after the last one (multi-token prediction) always computes its own.
        """
        if layer > len(self.is_computing):
            return layer
        while not self.is_computing[layer - 1]:
            layer -= 1
        return layer

    def computes(self, layer: int) -> bool:
        """Return True if layer ``layer`` (from 1) has an indexer."""
        return self.source(layer) == layer

    def check_stages(self, first_layers: Iterable[int]) -> None:
        """Check that every pipeline stage starts with a computing layer.

        Stages send only hidden states, not the selection of keys.

        Args:
            first_layers: number of the first layer (from 1) of every (virtual) stage that has layers.

        Raises:
            PipelineSplitError: names the first stage that starts with a skip layer.
        """
        for first in first_layers:
            if not self.computes(first):
                computing = [layer for layer in range(1, len(self.is_computing) + 1) if self.computes(layer)]
                raise PipelineSplitError(
                    f"DSA index-share pipeline split is invalid: a stage starts at layer {first}, which takes its "
                    f"keys from source layer {self.source(first)} of an earlier stage (index_topk_freq={self.freq}, "
                    f"index_skip_topk_offset={self.offset}); a stage must start at a computing layer: "
                    f"{_ranges(computing)}. Change --decoder-first-pipeline-num-layers, "
                    "--decoder-last-pipeline-num-layers or --pipeline-model-parallel-size."
                )


def index_sharing(config: Mapping[str, Any], num_layers: int) -> IndexSharing:
    """Return the sharing in a HF config: by layer types, or else by pattern, or else by frequency and offset.

    Raises:
        ConfigError: a list has another length or an unknown entry, or the first layer does not compute.
    """
    freq = max(int(config.get("index_topk_freq") or 1), 1)
    offset = config.get("index_skip_topk_offset")
    offset = 2 if offset is None else int(offset)
    types = config.get("indexer_types")
    key = "indexer_types"
    if types is None:
        types, key = config.get("index_topk_pattern"), "index_topk_pattern"
    if types is None:
        computing = tuple(max(layer - offset, 0) % freq == 0 for layer in range(1, num_layers + 1))
    else:
        computing = _from_types(key, types, num_layers)
    if not computing[0]:
        raise ConfigError(
            f"Layer 1 of {num_layers} would take over the keys of a layer before it (index_topk_freq={freq}, "
            f"index_skip_topk_offset={offset}, {key}={config.get(key)}); layer 1 must compute. Correct config.json of "
            "--hf-checkpoint."
        )
    return IndexSharing(computing, freq, offset)


def _from_types(key: str, types: str | Sequence[str], num_layers: int) -> tuple[bool, ...]:
    """Parse ``FSSF`` or ``["full", "shared", ...]``; entries after the last layer belong to multi-token
    prediction.
    """
    known = {"F": True, "S": False, "full": True, "shared": False}
    unknown = sorted({entry for entry in types if entry not in known})
    if len(types) < num_layers or unknown:
        raise ConfigError(
            f"{key} in config.json of --hf-checkpoint has {len(types)} entries"
            f"{f', among them {unknown}' if unknown else ''}; it must have one of {', '.join(known)} for each of the "
            f"{num_layers} layers."
        )
    return tuple(known[entry] for entry in types[:num_layers])


def _ranges(layers: Sequence[int]) -> str:
    """Format a list of numbers, eliding the middle of a long one."""
    shown = [str(layer) for layer in layers]
    if len(shown) > 12:
        shown = [*shown[:6], "...", *shown[-3:]]
    return ", ".join(shown)
