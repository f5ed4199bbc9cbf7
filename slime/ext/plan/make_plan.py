"""The plan of a run: complete flags in, :class:`Plan` out.

Here ``args`` are read and the two backends known; what is called is arithmetic over frozen configs.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime.backends.megatron_utils.flags.check_arguments import check_expert_layout
from slime.backends.megatron_utils.flags.model_dims import model_dims, schedule_config
from slime.backends.megatron_utils.flags.parallel import ParallelSizes, PipelineSplit
from slime.backends.megatron_utils.models import family_of_spec
from slime.backends.sglang_utils.sglang_config import resolve_sglang_config
from slime.ext.plan.activations import Recompute, chunk_activations
from slime.ext.plan.engines import (
    ENGINE_ASLEEP_BYTES,
    AdapterSlots,
    EngineGpus,
    EngineShape,
    engine_memory,
    engine_places,
    engine_problems,
    placement_problems,
    quantized_bytes,
    quantized_expert_bytes,
)
from slime.ext.plan.layout import StageChunk, rank_places, stage_chunks
from slime.ext.plan.parameters import Adapters, chunk_parameters, model_size, with_adapters
from slime.ext.plan.plan import Card, EngineGroupPlan, GpuPhases, Plan, PlanOptions, StagePlan
from slime.ext.plan.prompts import (
    image_patches,
    longest_sample,
    patches_of_rank,
    sample_lengths,
    with_image_tokens,
)
from slime.ext.plan.run_flags import RunFlags
from slime.ext.plan.traffic import PushTraffic, StepWork, step_work
from slime.ext.plan.trainer_memory import (
    CONTEXT_BYTES,
    ENGINE_GROUPS_BYTES,
    GIB,
    TRAINER_ASLEEP_BYTES,
    HostMemory,
    TrainerSettings,
    add_hosts,
    rank_host_memory,
    rank_memory,
    state_copies,
    trainer_bytes_beside_engine,
)
from slime.flags.algorithm import uses_reference
from slime.flags.cluster import plan_gpus
from slime.train_data.model_dims import ModelDims
from slime.utils.errors import SlimeError


def make_plan(args: Namespace, hf_config: Mapping[str, Any], options: PlanOptions) -> Plan:
    """Make the plan of complete ``args``.

    Args:
        hf_config: config.json of ``--hf-checkpoint``, or what is assumed of it.
    """
    problems: list[str] = []
    notes = list(_notes(args, options))
    run = RunFlags.of(args)
    dims, sizes = model_dims(args, hf_config), ParallelSizes.from_args(args)
    if not args.debug_rollout_only:
        check_expert_layout(sizes, args.num_experts)
    images = image_patches(dims, options)
    options = with_image_tokens(dims, options, images)
    split = stage_chunks(PipelineSplit.from_args(args))
    work = None
    if run.num_samples:
        parallel = {
            "dp_size": sizes.data,
            "cp_size": sizes.context,
            "vpp_size": sizes.virtual,
            "microbatch_group_size_per_vp_stage": args.microbatch_group_size_per_vp_stage or 1,
        }
        lengths = options.lengths or sample_lengths(run, options.prompts)
        try:
            work = step_work(
                list(lengths),
                schedule=schedule_config(args, parallel),
                flops=dims,
                global_batch_size=args.global_batch_size,
                pipeline=sizes.pipeline,
                forward_passes=forward_passes(args),
                recomputes_everything=args.recompute_granularity == "full",
                images=images,
            )
        except SlimeError as error:
            problems.append(f"Batches: {error}")
    tokens = micro_batch_tokens(run, sizes, work, options.prompts)
    settings = TrainerSettings.from_args(
        args,
        sizes,
        tokens=tokens,
        num_microbatches=min(work.num_microbatches) if work else sizes.pipeline,
        patches=patches_of_rank(tokens, sum(images), sizes, work),
    )
    adapters, has_router_bias = Adapters.from_args(args), bool(args.moe_router_enable_expert_bias)
    stages = [
        plan_stage(number, chunks, dims, sizes, settings, adapters, has_router_bias=has_router_bias)
        for number, chunks in enumerate(split)
    ]
    beside_engine = trainer_bytes_beside_engine(run, sizes)
    places, groups = plan_engines(args, dims, sizes, hf_config, options, problems, beside_engine)
    phases = plan_phases(run, beside_engine, stages, groups)
    has_reference = uses_reference(args.use_kl_loss, args.kl_coef)
    host = plan_host(run, sizes, stages, places, parked=parked_copies(run, has_reference=has_reference))
    num_gpus = plan_gpus(args).num_gpus
    return Plan(
        problems=problems,
        too_large=too_large(phases, host, groups, options.card),
        notes=notes,
        model=str(args.hf_checkpoint),
        num_parameters=model_size(dims),
        card=options.card,
        num_gpus=num_gpus,
        num_nodes=-(-num_gpus // args.num_gpus_per_node),
        sizes=sizes,
        ranks=rank_places(sizes, args.num_gpus_per_node) if not args.debug_rollout_only else [],
        stages=stages,
        engines=places,
        engine_groups=groups,
        phases=phases,
        host=host,
        work=work,
        push=plan_push(run, dims, sizes, groups, places, hf_config),
        train_seconds=train_seconds(work, sizes, options),
        micro_batch_tokens=settings.batch.tokens,
    )


def _notes(args: Namespace, options: PlanOptions) -> Iterator[str]:
    """Yield one sentence for each point in which the plan differs from the run."""
    if args.custom_model_provider_path or (args.spec and family_of_spec(args.spec) is None):
        which = args.custom_model_provider_path or " ".join(args.spec)
        yield f"{which} makes the layers; the plan counts standard layers with the sizes of the flags."
    if vars(args).get("lora_rank") is not None:
        yield "Adapters are counted in memory, not in time: products of frozen weights have no gradient of the weight."
    if (precision := vars(args).get("lora_base_precision")) is not None:
        yield f"Weights become {precision} once they are loaded: whole, they must fit a card too."
    if args.only_train_params_name_list or args.freeze_params_name_list:
        yield "Frozen parameters are counted as trained: gradients and optimizer are an upper bound."
    if args.use_critic:
        yield "The critic is counted as a second trainer of the actor's shape, asleep while the actor works."
    if args.multimodal_keys and not options.images:
        yield "No image is counted; tools/plan.py --image HxW counts one for each sample."
    if options.lengths is None and not options.prompts and args.rollout_max_prompt_len is None:
        yield (
            f"No prompt is counted: {args.prompt_data or 'a file of prompts'} or its tokenizer is not here. "
            "--rollout-max-prompt-len N counts N tokens for each, --lengths FILE says the samples' lengths."
        )


def forward_passes(args: Namespace) -> int:
    """Count the actor's passes without gradients over a rollout's samples: reference, teachers, old policy."""
    from slime.backends.megatron_utils.forward import needs_old_log_probs

    if not args.compute_advantages_and_returns:
        return 0
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    has_old = needs_old_log_probs(args, max(samples // args.global_batch_size, 1))
    return sum(map(bool, [uses_reference(args.use_kl_loss, args.kl_coef), has_old])) + len(args.frozen_policies)


def train_seconds(work: StepWork | None, sizes: ParallelSizes, options: PlanOptions) -> float | None:
    """Return the seconds of the trainer's passes, the slowest rank's, its waits in the pipeline included."""
    if work is None:
        return None
    rate = sizes.world * options.card.bf16_flops * options.mfu * (1 - work.bubble)
    return (work.hardware_flops + work.tower_flops * (sizes.tower_copies - 1)) * work.imbalance / rate


def micro_batch_tokens(run: RunFlags, sizes: ParallelSizes, work: StepWork | None, prompts: Sequence[int] = ()) -> int:
    """Return the tokens of the largest micro-batch on one context-parallel rank, which is no less than one sample."""
    longest = longest_sample(run, prompts) if work is None else work.longest
    if run.use_dynamic_batch_size:
        per_rank = max(run.max_tokens_per_gpu or 0, -(-longest // sizes.context))
    else:
        per_rank = -(-longest * run.micro_batch_size // sizes.context)
    multiple = run.data_pad_size_multiplier * sizes.tensor
    return -(-per_rank // multiple) * multiple


def plan_stage(
    number: int, chunks: list[StageChunk], dims: ModelDims, sizes: ParallelSizes, settings: TrainerSettings,
    adapters: Adapters | None, *, has_router_bias: bool,
) -> StagePlan:  # fmt: skip
    """Plan stage ``number``: its layers, and the parameters and memory of one rank."""
    count = chunk_parameters(chunks, dims, sizes, has_router_bias=has_router_bias)
    if adapters is not None:
        count = with_adapters(count, chunks, dims, sizes, adapters)
    memory = rank_memory(chunks, number, count, dims, sizes, settings)
    layers = [layer for chunk in chunks for layer in chunk.layers]
    once = [chunk_activations((layer,), dims, sizes, settings.batch, Recompute()).kept for layer in layers]
    forward = memory.static + memory.details.get("logits", 0) + max(once, default=0)
    return StagePlan(
        number, [chunk.as_text() for chunk in chunks], layers[0] + 1 if layers else None, len(layers), count, memory,
        forward,
    )  # fmt: skip


def plan_engines(
    args: Namespace, dims: ModelDims, sizes: ParallelSizes, hf_config: Mapping[str, Any], options: PlanOptions,
    problems: list[str], trainer_bytes: int,
) -> tuple[list[EngineGpus], list[EngineGroupPlan]]:  # fmt: skip
    """Plan every engine's place, and each group of like engines that serve; none for external engines.

    What the groups break is appended to ``problems``.

    Args:
        trainer_bytes: what an idle trainer keeps on an engine's card.
    """
    if args.debug_train_only or args.rollout_external or not args.rollout_num_gpus:
        return [], []
    try:
        config = resolve_sglang_config(args)
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
    problems += placement_problems(places, args.num_gpus_per_node)
    weight_bytes, expert_bytes = quantized_bytes(hf_config), quantized_expert_bytes(hf_config)
    plans = []
    for model in config.models:
        for group in model.server_groups:
            if group.worker_type in ("placeholder", "encoder"):
                continue
            engine = EngineShape.from_flags(
                group.of_flags, group.overrides, num_gpus=group.num_gpus_per_engine, weight_bytes=weight_bytes,
                expert_bytes=expert_bytes, mtp_layers=max(dims.num_mtp_layers, 1),
                adapter_slots=AdapterSlots.from_settings(args.engine_settings),
            )  # fmt: skip
            where = f"Engines {group.worker_type!r} of model {model.name!r}"
            merged = {**group.of_flags, **group.overrides, "disaggregation": group.worker_type}
            problems += engine_problems(dims, engine, merged, options.environment, where)
            if not engine.has_ranks(dims):
                continue
            memory = engine_memory(
                dims, engine, card_bytes=options.card.memory, other_bytes=trainer_bytes, is_colocated=args.colocate
            )
            plans.append(
                EngineGroupPlan(
                    model.name, group.worker_type, group.num_gpus // group.num_gpus_per_engine,
                    group.num_gpus_per_engine, max(1, group.num_gpus_per_engine // args.num_gpus_per_node), engine,
                    memory,
                )
            )  # fmt: skip
    return places, plans


def plan_phases(
    run: RunFlags, trainer_bytes: int, stages: list[StagePlan], groups: list[EngineGroupPlan]
) -> GpuPhases:
    """Return the fullest card of each phase; ``trainer_bytes``: what an idle trainer keeps on an engine's."""
    trains = not run.debug_rollout_only
    shares = run.colocate and bool(groups)
    is_wide = any(group.num_gpus_per_engine > 1 for group in groups)
    engine_asleep = ENGINE_ASLEEP_BYTES + ENGINE_GROUPS_BYTES * is_wide if shares and run.offload_rollout else 0
    full = (CONTEXT_BYTES + g.memory.weights + max(g.memory.kv_cache, 0) + g.memory.adapters for g in groups)
    engine_full = max(full, default=0)
    buffers = run.push_buffer_bytes
    beside_trainer = buffers + (engine_asleep if run.offload_rollout else engine_full if shares else 0)
    awake = max(stage.memory.static + stage.memory.outside for stage in stages) + buffers
    asleep = trainer_bytes or TRAINER_ASLEEP_BYTES
    if not run.offload_train:
        asleep = awake
    train = max(stage.memory.peak + stage.memory.outside for stage in stages) + beside_trainer
    forward = max(stage.forward_peak + stage.memory.outside for stage in stages) + beside_trainer
    if run.use_critic:
        train, forward = train + TRAINER_ASLEEP_BYTES, forward + TRAINER_ASLEEP_BYTES
    beside_engine = (asleep if shares else 0) if trains else 0
    push = None
    if groups and trains:
        weights = max(CONTEXT_BYTES + group.memory.weights for group in groups)
        push = beside_engine + weights + run.update_weight_buffer_size * (1 if shares else 2)
    return GpuPhases(
        train=train if trains else None,
        log_probs=forward if trains else None,
        asleep=asleep if trains and run.offload_train else None,
        rollout=beside_engine + engine_full if groups else None,
        push=push,
    )


def plan_host(
    run: RunFlags, sizes: ParallelSizes, stages: list[StagePlan], places: list[EngineGpus], *, parked: int
) -> HostMemory:
    """Return the node that needs most memory; ``parked``: the trainer's sets of weights in pinned memory."""
    if run.debug_rollout_only:
        return add_hosts([])
    per_node: dict[int, list[HostMemory]] = {}
    for place in rank_places(sizes, run.num_gpus_per_node):
        host = rank_host_memory(
            stages[place.pipeline].memory,
            parked_copies=parked,
            is_offloaded=bool(run.offload_train),
            saves_in_background=bool(run.async_save),
            state_copies=state_copies(run, sizes),
            trains_critic=bool(run.use_critic),
            has_engine=bool(run.colocate and places),
        )
        per_node.setdefault(place.node, []).append(host)
    return max((add_hosts(hosts) for hosts in per_node.values()), key=lambda host: host.total)


def parked_copies(run: RunFlags, *, has_reference: bool) -> int:
    """Count the sets of weights that the trainer keeps in pinned memory."""
    old = [run.keep_old_actor] * 2  # what drew the rollout, and what the engines have
    count = sum(map(bool, [has_reference, *old])) + len(run.frozen_policies)
    return count + (count > 0 or bool(run.offload_train))


def too_large(phases: GpuPhases, host: HostMemory, groups: list[EngineGroupPlan], card: Card) -> list[str]:
    """Return one sentence for each phase, engine group or host that needs more than there is, with a remedy."""
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


def plan_push(
    run: RunFlags, dims: ModelDims, sizes: ParallelSizes, groups: list[EngineGroupPlan],
    places: list[EngineGpus], hf_config: Mapping[str, Any],
) -> PushTraffic | None:  # fmt: skip
    """Return the traffic of a full push; None when nothing is pushed.  Embedding and head stay in bf16."""
    if not groups or run.debug_rollout_only:
        return None
    vocab = (1 if dims.has_tied_embeddings else 2) * dims.vocab_rows * dims.hidden_size
    matrices = model_size(dims) - vocab
    experts = sum(dims.is_moe) * (dims.num_experts or 0) * (dims.gate_factor + 1) * dims.expert_ffn * dims.hidden_size
    weights = (matrices - experts) * quantized_bytes(hf_config) + experts * quantized_expert_bytes(hf_config)
    model_bytes = int(weights + 2 * vocab)
    way = "disk" if run.update_weight_transport == "disk" else "colocated" if run.colocate else "distributed"
    sources = {"disk": 1, "colocated": sizes.world, "distributed": sizes.pipeline}[way]
    share = -(-model_bytes // sources)
    num_buckets = -(-share // run.update_weight_buffer_size)
    return PushTraffic(model_bytes, share, num_buckets, way, model_bytes * len(places))
