"""The plan of a run, put together: complete flags in, :class:`Plan` out.  Each part is a file of ``from_flags/``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.planning.from_flags.engines import plan_engines
from slime.planning.from_flags.phases import plan_host, plan_phases, too_large
from slime.planning.from_flags.push import plan_push
from slime.planning.from_flags.trainer import micro_batch_tokens, plan_stage, trainer_settings
from slime.planning.from_flags.work import plan_work, train_seconds
from slime.planning.gpus import plan_gpus
from slime.planning.parallel import ParallelSizes, rank_places
from slime.planning.parameters import model_size
from slime.planning.plan import Plan, PlanOptions
from slime.planning.stages import PipelineSplit, check_index_sharing, stage_chunks

KNOWN_SPECS = (
    "slime_plugins.models.glm4",
    "slime_plugins.models.glm5",
    "slime_plugins.models.minimax_m2",
    "slime_plugins.models.qwen3_next",
)
"""Packages of layer specs that the arithmetic knows."""


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
    shape, sizes = model_dims(args, hf_config), ParallelSizes.from_args(args)
    split = stage_chunks(PipelineSplit.from_args(args))
    problems += check_index_sharing(split, shape)
    work = plan_work(args, sizes, options, problems)
    settings = trainer_settings(
        args,
        sizes,
        tokens=micro_batch_tokens(args, sizes, work),
        num_microbatches=min(work.num_microbatches) if work else sizes.pipeline,
    )
    stages = [plan_stage(args, number, chunks, shape, sizes, settings) for number, chunks in enumerate(split)]
    trains = not args.debug_rollout_only
    places, groups = plan_engines(args, shape, sizes, hf_config, options, problems)
    phases = plan_phases(args, sizes, stages, groups, trains=trains)
    host = plan_host(args, sizes, stages, places)
    num_gpus = plan_gpus(args).num_gpus
    return Plan(
        problems=problems,
        too_large=too_large(phases, host, groups, options.card),
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
        push=plan_push(args, shape, sizes, groups, places, hf_config),
        train_seconds=train_seconds(work, sizes, options),
        micro_batch_tokens=settings.batch.tokens,
    )


def _notes(args: Namespace) -> Iterator[str]:
    """What the plan counts otherwise than the run will have it."""
    if args.custom_model_provider_path or (args.spec and not args.spec[0].startswith(KNOWN_SPECS)):
        which = args.custom_model_provider_path or " ".join(args.spec)
        yield f"{which} makes the layers; they are counted as the ordinary ones that the flags describe."
    if args.only_train_params_name_list or args.freeze_params_name_list:
        yield "Parameters frozen by name are counted as trained: gradients and optimizer are an upper bound."
    if args.use_critic:
        yield "The critic is counted as a second trainer of the actor's shape, asleep while the actor works."
