"""Memory by phase: the fullest card of each, the fullest host, and what is too large for either."""

from __future__ import annotations

from argparse import Namespace

from slime.planning.cards import Card
from slime.planning.engines import ENGINE_ASLEEP_BYTES, EngineGpus
from slime.planning.from_flags.trainer import (
    TRAINER_ASLEEP_BYTES,
    push_buffer_bytes,
    trainer_bytes_beside_engine,
)
from slime.planning.host_memory import HostMemory, HostSettings, add_hosts, rank_host_memory
from slime.planning.parallel import ParallelSizes, rank_places
from slime.planning.plan import EngineGroupPlan, GpuPhases, StagePlan
from slime.planning.trainer_memory import CONTEXT_BYTES, GIB

ENGINE_GROUPS_BYTES = int(1.4 * GIB)
"""What a released engine keeps more when it spans several GPUs (measured with two)."""
PINNED_SHARE = 1.15
"""Pinned bytes for a byte of weights: torch rounds every tensor up to a power of two."""


def plan_phases(
    args: Namespace, sizes: ParallelSizes, stages: list[StagePlan], groups: list[EngineGroupPlan], *, trains: bool
) -> GpuPhases:
    """The fullest card of each phase."""
    shares = args.colocate and bool(groups)
    is_wide = any(group.num_gpus_per_engine > 1 for group in groups)
    engine_asleep = ENGINE_ASLEEP_BYTES + ENGINE_GROUPS_BYTES * is_wide if shares and args.offload_rollout else 0
    engine_full = max((CONTEXT_BYTES + g.memory.weights + max(g.memory.kv_cache, 0) for g in groups), default=0)
    beside_trainer = push_buffer_bytes(args) + (
        engine_asleep if args.offload_rollout else engine_full if shares else 0
    )
    awake = max(stage.memory.static + stage.memory.outside for stage in stages) + push_buffer_bytes(args)
    asleep = trainer_bytes_beside_engine(args, sizes) or TRAINER_ASLEEP_BYTES
    if not args.offload_train:
        asleep = awake
    train = max(stage.memory.peak + stage.memory.outside for stage in stages) + beside_trainer
    forward = max(stage.forward_peak + stage.memory.outside for stage in stages) + beside_trainer
    if args.use_critic:
        train, forward = train + TRAINER_ASLEEP_BYTES, forward + TRAINER_ASLEEP_BYTES
    beside_engine = (asleep if shares else 0) if trains else 0
    push = None
    if groups and trains:
        weights = max(CONTEXT_BYTES + group.memory.weights for group in groups)
        push = beside_engine + weights + args.update_weight_buffer_size * (1 if shares else 2)
    return GpuPhases(
        train=train if trains else None,
        log_probs=forward if trains else None,
        asleep=asleep if trains and args.offload_train else None,
        rollout=beside_engine + engine_full if groups else None,
        push=push,
    )


def plan_host(args: Namespace, sizes: ParallelSizes, stages: list[StagePlan], places: list[EngineGpus]) -> HostMemory:
    """The node that needs most."""
    if args.debug_rollout_only:
        return add_hosts([])
    settings = HostSettings(
        parked_copies=parked_copies(args),
        is_offloaded=bool(args.offload_train),
        saves_in_background=bool(args.async_save),
        trains_critic=bool(args.use_critic),
    )
    share = 1.0 if args.colocate and places else 0.0
    per_node: dict[int, list[HostMemory]] = {}
    for place in rank_places(sizes, args.num_gpus_per_node):
        memory = stages[place.pipeline].memory
        host = rank_host_memory(memory, settings, pinned_share=PINNED_SHARE, engine_ranks=share)
        per_node.setdefault(place.node, []).append(host)
    return max((add_hosts(hosts) for hosts in per_node.values()), key=lambda host: host.total)


def parked_copies(args: Namespace) -> int:
    """Sets of weights that the trainer keeps in pinned memory."""
    others = [args.kl_coef != 0 or args.use_kl_loss, args.use_opd and args.opd_type == "megatron"]
    old = [args.keep_old_actor] * 2  # what drew the rollout, and what the engines have
    count = sum(map(bool, [*others, *old]))
    return count + (count > 0 or bool(args.offload_train))


def too_large(phases: GpuPhases, host: HostMemory, groups: list[EngineGroupPlan], card: Card) -> list[str]:
    """One sentence for each phase, engine group or host that needs more than there is, with what would help."""
    found = []
    for name in ("train", "log_probs", "rollout", "push"):
        used = getattr(phases, name)
        if used is not None and used > card.memory:
            found.append(
                f"{name.replace('_', '-')}: {used / GIB:.1f} GiB on a card of {card.memory / GIB:.1f} GiB "
                f"({card.name}); {_REMEDY[name]}"
            )
    for group in groups:
        if group.memory.kv_cache <= 0:
            found.append(
                f"engines {group.worker_type!r} of model {group.model!r}: weights of {group.memory.weights / GIB:.1f} "
                f"GiB leave nothing for the KV cache at --sglang-mem-fraction-static "
                f"{group.shape.mem_fraction_static}; raise it, or --rollout-num-gpus-per-engine."
            )
    if host.total > card.host_memory:
        found.append(
            f"host: {host.total / GIB:.0f} GiB a node of {card.host_memory / GIB:.0f} GiB (--host-memory); use more "
            "nodes, or a smaller --optimizer-offload-fraction."
        )
    return found


_REMEDY = {
    "train": "recompute more (--recompute-granularity full --recompute-method uniform --recompute-num-layers 1), "
    "lower --max-tokens-per-gpu, use --optimizer-cpu-offload, or cut the model further.",
    "log_probs": "lower --max-tokens-per-gpu, use --optimizer-cpu-offload, or cut the model further.",
    "rollout": "lower --sglang-mem-fraction-static, or let the trainer sleep (--offload-train).",
    "push": "raise --rollout-num-gpus-per-engine, or lower --update-weight-buffer-size.",
}
