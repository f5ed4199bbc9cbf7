"""The plan of a run: complete flags in, one tree of frozen results out.

The only module of the package that reads ``args``, and that knows the backends; the others are arithmetic.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.backends.sglang_utils.sglang_config import SGLangConfig, resolve_sglang_config
from slime.planning import rules
from slime.planning.activations import MicroBatch, Recompute, chunk_activations
from slime.planning.cards import Card
from slime.planning.engines import (
    ENGINE_ASLEEP_BYTES,
    EngineMemory,
    EnginePlace,
    EngineShape,
    engine_memory,
    engine_places,
)
from slime.planning.gpus import plan_gpus
from slime.planning.host_memory import HostMemory, HostSettings, add_hosts, rank_host_memory
from slime.planning.model_shape import ModelShape
from slime.planning.parallel import ParallelSizes, RankPlace, rank_places
from slime.planning.parameters import ParameterCount, chunk_parameters, model_size
from slime.planning.stages import PipelineSplit, StageChunk, check_index_sharing, stage_chunks
from slime.planning.traffic import PushTraffic, StepWork, push_traffic, reference_lengths, step_work
from slime.planning.trainer_memory import CONTEXT_BYTES, GIB, RankMemory, TrainerSettings, rank_memory
from slime.train_data.flops import FlopsModel
from slime.train_data.schedule import ScheduleConfig
from slime.utils.errors import SlimeError

TRAINER_ASLEEP_BYTES = int(0.8 * GIB)
GROUPS_ASLEEP_BYTES = int(0.3 * GIB)
"""What a sleeping trainer keeps on the card, and what it keeps more with other ranks beside it (measured)."""
ENGINE_GROUPS_BYTES = int(1.4 * GIB)
"""What a released engine keeps more when it spans several GPUs (measured with two)."""
PINNED_SHARE = 1.15
"""Pinned bytes for a byte of weights: torch rounds every tensor up to a power of two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What the flags of a run do not say."""

    card: Card
    mfu: float = 0.35
    """Of the trainer's forward and backward passes, for the time of a step."""
    lengths: tuple[int, ...] | None = None
    """Tokens of each sample of a rollout; None for the reference distribution."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the job."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One pipeline stage: its layers, and what a rank of it holds."""

    stage: int
    layers: list[str]
    """Of every virtual stage, layers counted from 1."""
    first_layer: int | None
    num_layers: int
    parameters: ParameterCount
    memory: RankMemory
    forward_peak: int
    """Allocated in a pass without gradients."""


@dataclass(frozen=True, slots=True)
class GpuPhases:
    """Bytes used on the fullest card of each kind, by phase; None where a phase has no such card."""

    train: int | None
    log_probs: int | None
    asleep: int | None
    rollout: int | None
    push: int | None


@dataclass(frozen=True, slots=True)
class EngineGroupPlan:
    """Like engines."""

    model: str
    worker_type: str
    num_engines: int
    num_gpus_per_engine: int
    nnodes: int
    shape: EngineShape
    memory: EngineMemory


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is said of a run before it starts."""

    problems: list[str]
    """Rules that the run breaks; it would not start, or not run through."""
    too_large: list[str]
    """What does not fit into a card or a host."""
    notes: list[str]
    model: str
    num_parameters: int
    card: Card
    num_gpus: int
    num_nodes: int
    sizes: ParallelSizes
    ranks: list[RankPlace]
    stages: list[StagePlan]
    engines: list[EnginePlace]
    engine_groups: list[EngineGroupPlan]
    phases: GpuPhases
    host: HostMemory
    work: StepWork | None
    push: PushTraffic | None
    train_seconds: float | None
    micro_batch_tokens: int


def make_plan(args: Namespace, hf_config: Mapping[str, Any], options: PlanOptions) -> Plan:
    """The plan of complete ``args``.

    Args:
        args: derived and checked as for a run.
        hf_config: config.json of ``--hf-checkpoint``, or what is assumed of it.
        options: what the flags do not say.

    Raises:
        ConfigError: the layers cannot be cut as the flags say.
    """
    problems: list[str] = []
    notes = list(_notes(args))
    shape, sizes = ModelShape.from_args(args, hf_config), ParallelSizes.from_args(args)
    split = stage_chunks(PipelineSplit.from_args(args))
    problems += check_index_sharing(split, shape)
    work = _work(args, sizes, options, problems)
    settings = trainer_settings(
        args,
        sizes,
        tokens=_micro_batch_tokens(args, sizes, work),
        num_microbatches=min(work.num_microbatches) if work else sizes.pipeline,
    )
    stages = [_stage(args, number, chunks, shape, sizes, settings) for number, chunks in enumerate(split)]
    trains = not args.debug_rollout_only
    places, groups = _engines(args, shape, sizes, hf_config, options, problems)
    phases = _phases(args, sizes, stages, groups, options.card, trains=trains)
    host = _host(args, sizes, stages, places)
    num_gpus = plan_gpus(args).num_gpus
    plan = Plan(
        problems=problems,
        too_large=_too_large(phases, host, groups, options.card),
        notes=notes,
        model=str(args.hf_checkpoint),
        num_parameters=model_size(shape),
        card=options.card,
        num_gpus=num_gpus,
        num_nodes=-(-num_gpus // args.num_gpus_per_node),
        sizes=sizes,
        ranks=rank_places(sizes, args.num_gpus_per_node) if trains else [],
        stages=stages,
        engines=places,
        engine_groups=groups,
        phases=phases,
        host=host,
        work=work,
        push=_push(args, shape, sizes, groups, places, hf_config),
        train_seconds=_train_seconds(work, sizes, options),
        micro_batch_tokens=settings.batch.tokens,
    )
    return plan


KNOWN_SPECS = ("slime_plugins.models.glm4", "slime_plugins.models.glm5")
"""Packages of layer specs that the arithmetic knows."""


def _notes(args: Namespace) -> Iterator[str]:
    """What the plan counts otherwise than the run will have it."""
    if args.custom_model_provider_path or (args.spec and not args.spec[0].startswith(KNOWN_SPECS)):
        which = args.custom_model_provider_path or " ".join(args.spec)
        yield f"{which} makes the layers; they are counted as the ordinary ones that the flags describe."
    if args.only_train_params_name_list or args.freeze_params_name_list:
        yield "Parameters frozen by name are counted as trained: gradients and optimizer are an upper bound."
    if args.use_critic:
        yield "The critic is counted as a second trainer of the actor's shape, asleep while the actor works."


# The trainer


def trainer_settings(args: Namespace, sizes: ParallelSizes, *, tokens: int, num_microbatches: int) -> TrainerSettings:
    """What decides the trainer's memory, from complete flags.

    Args:
        args: complete flags.
        sizes: of the groups.
        tokens: of the largest micro-batch on a rank.
        num_microbatches: of a step and rank.
    """
    element = 4 if args.fp32 else 2
    return TrainerSettings(
        batch=MicroBatch(tokens=tokens, element_bytes=element),
        recompute=Recompute(
            granularity=args.recompute_granularity,
            method=args.recompute_method,
            num_layers=args.recompute_num_layers or 1,
            modules=tuple(args.recompute_modules or ("core_attn",)),
        ),
        weight_bytes=element,
        gradient_bytes=4 if args.accumulate_allreduce_grads_in_fp32 or args.fp32 else 2,
        has_master_weights=not args.fp32,
        offloaded_fraction=args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0,
        has_optimizer=args.num_rollout != 0,
        num_microbatches=num_microbatches,
        vp_group=args.microbatch_group_size_per_vp_stage or sizes.pipeline,
        mtp_chunk=args.log_probs_chunk_size,
    )


def _micro_batch_tokens(args: Namespace, sizes: ParallelSizes, work: StepWork | None) -> int:
    """Tokens of the largest micro-batch on one context-parallel rank: a sample that is longer is one by itself."""
    longest = _longest(args) if work is None else work.longest
    if args.use_dynamic_batch_size:
        per_rank = max(args.max_tokens_per_gpu, -(-longest // sizes.context))
    else:
        per_rank = -(-longest * args.micro_batch_size // sizes.context)
    multiple = args.data_pad_size_multiplier * sizes.tensor
    return -(-per_rank // multiple) * multiple


def _longest(args: Namespace) -> int:
    """The longest sample that the flags allow, a prompt of unknown length left out."""
    if args.rollout_max_context_len is not None:
        return int(args.rollout_max_context_len)
    return int((args.rollout_max_response_len or 0) + (args.rollout_max_prompt_len or 0)) or int(args.seq_length)


def _stage(
    args: Namespace, number: int, chunks: list[StageChunk], shape: ModelShape, sizes: ParallelSizes,
    settings: TrainerSettings,
) -> StagePlan:  # fmt: skip
    count = chunk_parameters(chunks, shape, sizes, has_router_bias=bool(args.moe_router_enable_expert_bias))
    memory = rank_memory(chunks, number, count, shape, sizes, settings)
    layers = [layer for chunk in chunks for layer in chunk.layers]
    once = [chunk_activations((layer,), shape, sizes, settings.batch, Recompute()).kept for layer in layers]
    forward = memory.static + memory.details.get("logits", 0) + max(once, default=0)
    return StagePlan(
        number, [chunk.as_text() for chunk in chunks], layers[0] + 1 if layers else None, len(layers), count, memory,
        forward,
    )  # fmt: skip


# The engines


def _engines(
    args: Namespace, shape: ModelShape, sizes: ParallelSizes, hf_config: Mapping[str, Any], options: PlanOptions,
    problems: list[str],
) -> tuple[list[EnginePlace], list[EngineGroupPlan]]:  # fmt: skip
    if args.debug_train_only or args.rollout_external or not args.rollout_num_gpus:
        return [], []
    try:
        config: SGLangConfig = resolve_sglang_config(args)
    except SlimeError as error:
        problems.append(str(error))
        return [], []
    trainer_gpus = 0 if args.debug_rollout_only else sizes.world
    groups = [
        (model.name, group.worker_type, group.num_gpus, group.num_gpus_per_engine)
        for model in config.models
        for group in model.server_groups
    ]
    places = engine_places(
        groups,
        rollout_offset=plan_gpus(args).rollout_offset,
        gpus_per_node=args.num_gpus_per_node,
        trainer_gpus=trainer_gpus,
    )
    problems += rules.placement_problems(places, args.num_gpus_per_node)
    flags = {name.removeprefix("sglang_"): value for name, value in vars(args).items() if name.startswith("sglang_")}
    weight_bytes = quantized_bytes(hf_config)
    plans = []
    for model in config.models:
        for group in model.server_groups:
            if group.worker_type in ("placeholder", "encoder"):
                continue
            engine = EngineShape.from_flags(
                flags, group.overrides, num_gpus=group.num_gpus_per_engine, weight_bytes=weight_bytes,
                mtp_layers=max(shape.mtp_layers, 1),
            )  # fmt: skip
            where = f"Engines {group.worker_type!r} of model {model.name!r}"
            merged = {**flags, **group.overrides, "disaggregation": group.worker_type}
            found = list(rules.engine_problems(shape, engine, merged, options.environment, where))
            problems += found
            other = _beside_engine(args, sizes)
            memory = engine_memory(shape, engine, card_bytes=options.card.memory, other_bytes=other)
            plans.append(
                EngineGroupPlan(
                    model.name, group.worker_type, group.num_gpus // group.num_gpus_per_engine,
                    group.num_gpus_per_engine, max(1, group.num_gpus_per_engine // args.num_gpus_per_node), engine,
                    memory,
                )
            )  # fmt: skip
    return places, plans


def quantized_bytes(hf_config: Mapping[str, Any]) -> float:
    """Bytes of an element of a layer's matrix as the engines store it."""
    quantization = hf_config.get("quantization_config") or {}
    method = str(quantization.get("quant_method", ""))
    if method == "fp8":
        rows, columns = quantization.get("weight_block_size") or (1, 128)
        return 1 + 4 / (rows * columns)
    if method in ("compressed-tensors", "awq", "gptq"):
        return 0.5 + 2 / 32
    return 2.0


def _beside_engine(args: Namespace, sizes: ParallelSizes) -> int:
    """What a trainer that is not working keeps on an engine's card."""
    if not args.colocate or args.debug_rollout_only:
        return 0
    return TRAINER_ASLEEP_BYTES + (GROUPS_ASLEEP_BYTES if sizes.world > 1 else 0)


# Phases


def _phases(
    args: Namespace, sizes: ParallelSizes, stages: list[StagePlan], groups: list[EngineGroupPlan], card: Card, *,
    trains: bool,
) -> GpuPhases:  # fmt: skip
    """The fullest card of each phase."""
    shares = args.colocate and bool(groups)
    is_wide = any(group.num_gpus_per_engine > 1 for group in groups)
    engine_asleep = ENGINE_ASLEEP_BYTES + ENGINE_GROUPS_BYTES * is_wide if shares and args.offload_rollout else 0
    engine_full = max((CONTEXT_BYTES + g.memory.weights + max(g.memory.kv_cache, 0) for g in groups), default=0)
    beside_trainer = engine_asleep if args.offload_rollout else engine_full if shares else 0
    awake = max(stage.memory.static + stage.memory.outside for stage in stages)
    asleep = _beside_engine(args, sizes) or TRAINER_ASLEEP_BYTES
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
        push = beside_engine + weights + 2 * args.update_weight_buffer_size
    return GpuPhases(
        train=train if trains else None,
        log_probs=forward if trains else None,
        asleep=asleep if trains and args.offload_train else None,
        rollout=beside_engine + engine_full if groups else None,
        push=push,
    )


def _host(args: Namespace, sizes: ParallelSizes, stages: list[StagePlan], places: list[EnginePlace]) -> HostMemory:
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


def _too_large(phases: GpuPhases, host: HostMemory, groups: list[EngineGroupPlan], card: Card) -> list[str]:
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


# Work and traffic


def _work(args: Namespace, sizes: ParallelSizes, options: PlanOptions, problems: list[str]) -> StepWork | None:
    if args.debug_rollout_only or not args.rollout_batch_size or not args.global_batch_size:
        return None
    num_samples = args.rollout_batch_size * args.n_samples_per_prompt
    lengths = list(options.lengths or reference_lengths(num_samples, _longest(args)))
    schedule = ScheduleConfig.from_args(
        args,
        dp_size=sizes.data,
        cp_size=sizes.context,
        vpp_size=sizes.virtual,
        microbatch_group_size_per_vp_stage=args.microbatch_group_size_per_vp_stage or 1,
    )
    try:
        return step_work(
            lengths,
            schedule=schedule,
            flops=FlopsModel.from_args(args),
            global_batch_size=args.global_batch_size,
            pipeline=sizes.pipeline,
            forward_passes=forward_passes(args),
            recomputes_everything=args.recompute_granularity == "full",
        )
    except SlimeError as error:
        problems.append(f"Batches: {error}")
        return None


def forward_passes(args: Namespace) -> int:
    """Passes without gradients over a rollout's samples: reference, teacher, old policy, critic's values."""
    from slime.backends.megatron_utils.old_log_probs import needs_old_log_probs

    if not args.compute_advantages_and_returns:
        return 0
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    steps = [0] * max(samples // args.global_batch_size, 1)
    has_old = needs_old_log_probs(args, {"num_microbatches": steps, "rollout_log_probs": []})
    return sum(
        map(bool, [args.kl_coef != 0 or args.use_kl_loss, args.use_opd and args.opd_type == "megatron", has_old])
    )


def _train_seconds(work: StepWork | None, sizes: ParallelSizes, options: PlanOptions) -> float | None:
    if work is None:
        return None
    rate = sizes.world * options.card.bf16_flops * options.mfu * (1 - work.bubble)
    return work.hardware_flops * work.imbalance / rate


def _push(
    args: Namespace, shape: ModelShape, sizes: ParallelSizes, groups: list[EngineGroupPlan],
    places: list[EnginePlace], hf_config: Mapping[str, Any],
) -> PushTraffic | None:  # fmt: skip
    if not groups or args.debug_rollout_only:
        return None
    vocab = (1 if shape.is_tied else 2) * shape.vocab * shape.hidden
    matrices = model_size(shape) - vocab
    model_bytes = int(matrices * quantized_bytes(hf_config) + 2 * vocab)
    way = "disk" if args.update_weight_transport == "disk" else "colocated" if args.colocate else "distributed"
    return push_traffic(
        model_bytes,
        num_engines=len(places),
        trainer_ranks=sizes.world,
        pipeline=sizes.pipeline,
        bucket_bytes=args.update_weight_buffer_size,
        way=way,
    )
