"""Rules of SGLang and DeepEP that an engine would meet only when it starts, as messages; nothing is raised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime.planning.engines import EngineGpus, EngineShape
from slime.train_data.model_dims import ModelDims

DEEPEP_MAX_RANKS = 160
"""DeepEP's table of dispatch settings ends here."""
DISPATCH_LIMIT = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
DISPATCH_LIMIT_DEFAULT = 128


def engine_problems(
    shape: ModelDims, engine: EngineShape, flags: Mapping[str, Any], environment: Mapping[str, str], where: str
) -> Iterator[str]:
    """What the engines of one group break.

    Args:
        shape: of the model.
        engine: its layout.
        flags: ``--sglang-*`` values without the prefix, the group's overrides laid over them.
        environment: of the job.
        where: names the group.
    """
    if engine.enable_dp_attention and engine.tp_size % engine.dp_size:
        yield (
            f"{where}: dp_size is {engine.dp_size}, which must divide the engine's {engine.tp_size} tensor-parallel "
            f"ranks; use {_nearest_divisor(engine.tp_size, engine.dp_size)} for --sglang-dp-size."
        )
        return
    heads = shape.num_attention_heads
    if heads % engine.attention_tp:
        yield (
            f"{where}: {heads} attention heads do not divide over {engine.attention_tp} tensor-parallel ranks; "
            f"change --rollout-num-gpus-per-engine to {_nearest_divisor(heads, engine.attention_tp)}, or use "
            "--sglang-enable-dp-attention with a larger --sglang-dp-size."
        )
    if shape.num_experts:
        yield from _expert_problems(shape, engine, flags, where)
        yield from _dispatch_problems(engine, flags, environment, where)


def _expert_problems(shape: ModelDims, engine: EngineShape, flags: Mapping[str, Any], where: str) -> Iterator[str]:
    if engine.tp_size % engine.ep_size:
        yield (
            f"{where}: ep_size is {engine.ep_size}, which must divide the engine's {engine.tp_size} ranks; use "
            f"{_nearest_divisor(engine.tp_size, engine.ep_size)} for --sglang-ep-size."
        )
    experts = shape.num_experts + engine.redundant_experts
    if experts % engine.ep_size:
        missing = -experts % engine.ep_size
        yield (
            f"{where}: {shape.num_experts} experts and {engine.redundant_experts} redundant ones do not divide over "
            f"{engine.ep_size} expert-parallel ranks; use --sglang-ep-num-redundant-experts "
            f"{engine.redundant_experts + missing}."
        )
    if flags.get("moe_a2a_backend") == "deepep" and engine.ep_size > DEEPEP_MAX_RANKS:
        yield (
            f"{where}: ep_size is {engine.ep_size}; DeepEP dispatches to at most {DEEPEP_MAX_RANKS} ranks; run "
            "several smaller engines (--rollout-num-gpus-per-engine, or num_gpus_per_engine in --sglang-config)."
        )


def _dispatch_problems(
    engine: EngineShape, flags: Mapping[str, Any], environment: Mapping[str, str], where: str
) -> Iterator[str]:
    """DeepEP's low-latency buffers must take the largest decode batch of a CUDA graph."""
    is_low_latency = flags.get("deepep_mode") in ("low_latency", "auto", None)
    if flags.get("moe_a2a_backend") != "deepep" or not is_low_latency or flags.get("disaggregation") == "prefill":
        return
    batch = _largest_graph(flags)
    draft = flags.get("speculative_num_draft_tokens") if flags.get("speculative_algorithm") else None
    needed = batch * (draft or 1)
    limit = int(environment.get(DISPATCH_LIMIT) or DISPATCH_LIMIT_DEFAULT)
    if needed > limit:
        rounded = 1 << (needed - 1).bit_length()
        times = f" x {draft} draft tokens" if draft else ""
        yield (
            f"{where}: {DISPATCH_LIMIT} is {limit}; the largest decode batch is {batch} requests "
            f"(--sglang-cuda-graph-max-bs){times} = {needed} tokens; set the variable to {rounded}, or lower "
            "--sglang-cuda-graph-max-bs."
        )


def _largest_graph(flags: Mapping[str, Any]) -> int:
    """Requests of the largest CUDA graph for decoding; 0 when SGLang chooses.  Older names come from overrides."""
    for suffix in ("", "_decode"):
        sizes = flags.get(f"cuda_graph_bs{suffix}") or [0]
        if largest := flags.get(f"cuda_graph_max_bs{suffix}") or max(sizes):
            return int(largest)
    return 0


def placement_problems(places: list[EngineGpus], gpus_per_node: int) -> Iterator[str]:
    """Engines over several nodes that do not begin at a node's first GPU."""
    for place in places:
        is_split = place.first_gpu % gpus_per_node + min(place.num_gpus, gpus_per_node) > gpus_per_node
        if is_split or (place.num_gpus > gpus_per_node and place.first_gpu % gpus_per_node):
            yield (
                f"Engine {place.index} ({place.worker_type}) of model {place.model} has GPUs {place.first_gpu} to "
                f"{place.first_gpu + place.num_gpus - 1}, which cuts a node of {gpus_per_node} in two; order the "
                "groups of --sglang-config by the size of their engines, or change --rollout-num-gpus-per-engine."
            )


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    return min(divisors, key=lambda size: (abs(size - wanted), size))
