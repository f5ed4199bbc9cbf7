"""Places of a run's ranks on the GPUs of the job, and the layers of every pipeline stage."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slime.backends.megatron_utils.flags.parallel import ParallelSizes, PipelineSplit
from slime.utils.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One trainer rank: where it runs, and which part of the work it has."""

    rank: int
    node: int
    gpu: int
    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int
    expert_data: int


def rank_places(sizes: ParallelSizes, gpus_per_node: int) -> list[RankPlace]:
    """Return the place of every rank, in order.

    Ranks are dealt out to tensor, context, data and pipeline groups, the first varying fastest; for experts to
    expert-tensor, expert, expert-data and pipeline groups (megatron-core's order ``tp-cp-ep-dp-pp``).  Rank r runs on
    the r-th GPU of the job, nodes in order of their addresses.
    """
    places = []
    for rank in range(sizes.world):
        tensor, context, data, pipeline = _digits(rank, (sizes.tensor, sizes.context, sizes.data))
        expert_tensor, expert, expert_data, _ = _digits(rank, (sizes.expert_tensor, sizes.expert, sizes.expert_data))
        places.append(
            RankPlace(
                rank=rank, node=rank // gpus_per_node, gpu=rank % gpus_per_node,
                tensor=tensor, context=context, data=data, pipeline=pipeline,
                expert=expert, expert_tensor=expert_tensor, expert_data=expert_data,
            )
        )  # fmt: skip
    return places


def _digits(number: int, radices: tuple[int, ...]) -> tuple[int, ...]:
    digits = []
    for radix in radices:
        number, digit = divmod(number, radix)
        digits.append(digit)
    return (*digits, number)


@dataclass(frozen=True, slots=True)
class StageChunk:
    """Layers that follow each other on one rank of the pipeline; a virtual stage when the rank has several."""

    layers: tuple[int, ...]
    """Numbers from 0, over the whole model."""
    has_embedding: bool = False
    has_head: bool = False
    """The final norm, the vocabulary projection (or the critic's value head) and the MTP layers."""

    def as_text(self) -> str:
        """Return the layers from 1, as Megatron counts them, with what stands around them."""
        parts = ["embedding"] if self.has_embedding else []
        if self.layers:
            first, last = self.layers[0] + 1, self.layers[-1] + 1
            parts.append(f"{first}-{last}" if last > first else f"{first}")
        if self.has_head:
            parts.append("head")
        return ", ".join(parts) or "nothing"


def stage_chunks(split: PipelineSplit) -> list[list[StageChunk]]:
    """Return [stage][virtual stage] chunks: layers run through the first chunk of every stage, then the second, ..."""
    counts = _layout_counts(split) if split.layout else _even_counts(split)
    chunks: list[list[StageChunk]] = [[] for _ in range(split.stages)]
    next_layer = 0
    order = [(stage, virtual) for virtual in range(split.virtual) for stage in range(split.stages)]
    for position, (stage, virtual) in enumerate(order):
        count = counts[stage][virtual]
        layers = tuple(range(next_layer, next_layer + count))
        next_layer += count
        chunks[stage].append(StageChunk(layers, position == 0, position == len(order) - 1))
    if next_layer != split.num_layers:
        raise ConfigError(
            f"The pipeline stages hold {next_layer} layers, --num-layers is {split.num_layers}; change "
            "--pipeline-model-parallel-layout, or --decoder-first-pipeline-num-layers and "
            "--decoder-last-pipeline-num-layers."
        )
    return chunks


def _even_counts(split: PipelineSplit) -> list[list[int]]:
    fixed = [count for count in (split.first, split.last) if count is not None]
    units = split.num_layers - sum(fixed) + split.embedding_counts + split.loss_counts
    alike = split.stages - len(fixed)
    if alike < 0 or units < 0 or (alike and units % alike) or (not alike and units):
        raise ConfigError(
            f"--num-layers {split.num_layers}, less {sum(fixed)} of the first and last stage, leaves {units} layers "
            f"for {alike} pipeline stages; change --decoder-first-pipeline-num-layers or "
            "--decoder-last-pipeline-num-layers."
        )
    per_stage = [units // alike if alike else 0] * split.stages
    if split.first is not None:
        per_stage[0] = split.first
    if split.last is not None:
        per_stage[-1] = split.last
    if any(count % split.virtual for count in per_stage):
        raise ConfigError(
            f"The pipeline stages have {', '.join(map(str, per_stage))} layers; each must divide into its "
            f"{split.virtual} virtual stages; change --num-virtual-stages-per-pipeline-rank."
        )
    counts = [[count // split.virtual] * split.virtual for count in per_stage]
    counts[0][0] -= split.embedding_counts
    counts[-1][-1] -= split.loss_counts
    return counts


def _layout_counts(split: PipelineSplit) -> list[list[int]]:
    assert split.layout is not None
    stages = [stage.count("t") for stage in expand_layout(split.layout).split("|")]
    if len(stages) != split.stages * split.virtual:
        raise ConfigError(
            f"--pipeline-model-parallel-layout {split.layout} has {len(stages)} stages; "
            f"--pipeline-model-parallel-size {split.stages} must divide them into virtual stages."
        )
    return [stages[stage :: split.stages] for stage in range(split.stages)]


def expand_layout(layout: str) -> str:
    """Expand a custom layout's commas and repetitions: ``Et*2|(tt|)*2L`` is ``Ett|tt|tt|L``."""
    text = layout.replace(",", "").replace(" ", "")
    while (match := re.search(r"(\([^()]*\)|[A-Za-z|])\*(\d+)", text)) is not None:
        text = text[: match.start()] + match[1].strip("()") * int(match[2]) + text[match.end() :]
    return text.replace("(", "").replace(")", "")
