"""Differences between a Hugging Face folder and a push: stacked experts, parts that are not trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from slime.backends.megatron_utils.hf_to_megatron.tensors import HfTensors, stored_names
from slime.backends.megatron_utils.models import WeightMap
from slime.weights.stacked_experts import ExpertStacker

NamedTensor = tuple[str, Tensor]


def in_layout_of(source: Path | None, weight_map: WeightMap, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield the tensors as the folder ``source`` has them, and behind them those of its parts that did not come.

    Args:
        source: the folder whose config goes with them; None, or one without safetensors, changes nothing.
        weight_map: of the family.
        tensors: with names as pushes have them.

    Raises:
        DataError: ``source`` stacks experts of which some did not come.
    """
    if source is None or not stored_names(str(source)):
        yield from tensors
        return
    with HfTensors(source) as stored:
        stacker = ExpertStacker(stored.stacks)
        missing = {name for name in stored.stored_names() if weight_map.is_untrained(name)}
        for name, tensor in stacker.stack(tensors):
            missing.discard(name)
            yield name, tensor
        stacker.finish()
        for name in sorted(missing):
            yield name, stored.get_stored(name)
