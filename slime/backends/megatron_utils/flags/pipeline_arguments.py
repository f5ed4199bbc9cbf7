"""What the flags that cut the layers into pipeline stages may not say."""

from __future__ import annotations

from argparse import Namespace

from slime.backends.megatron_utils.flags.config_builders import num_layers_of_layout
from slime.utils.errors import ConfigError


def check_pipeline_arguments(args: Namespace) -> None:
    """Refuse cuts that do not come out even; ``args`` are complete.

    Raises:
        ConfigError: with the flags, their values and what is allowed.
    """
    stages = args.pipeline_model_parallel_size
    group_size = args.microbatch_group_size_per_vp_stage
    if args.virtual_pipeline_model_parallel_size and group_size < stages:
        raise ConfigError(
            f"--microbatch-group-size-per-vp-stage is {group_size}; it must be at least "
            f"--pipeline-model-parallel-size {stages}, its default."
        )
    uneven = [args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers]
    if stages == 1 and any(count is not None for count in uneven):
        raise ConfigError(
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers need "
            "--pipeline-model-parallel-size of at least 2; it is 1."
        )
    if args.pipeline_model_parallel_layout is not None:
        _check_layout_string(args)
    elif all(count is None for count in uneven):
        _check_even_split(args)
    else:
        _check_middle(args)


def _check_even_split(args: Namespace) -> None:
    stages = args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1)
    counted = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    if (args.num_layers + counted) % stages:
        also = f" and the {counted} that count as layers" if counted else ""
        raise ConfigError(
            f"--num-layers is {args.num_layers}; the {stages} pipeline stages must divide it{also}, or give "
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers."
        )


def _check_middle(args: Namespace) -> None:
    """With some layers given to the first or the last stage, the others share the rest evenly."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    middle_stages = args.pipeline_model_parallel_size - (first is not None) - (last is not None)
    rest = args.num_layers - (first or 0) - (last or 0)
    counted = args.account_for_embedding_in_pipeline_split * (first is None)
    counted += args.account_for_loss_in_pipeline_split * (last is None)
    said = " and ".join(
        f"--decoder-{end}-pipeline-num-layers {count}"
        for end, count in (("first", first), ("last", last))
        if count is not None
    )
    if rest < 0 or (middle_stages == 0 and rest):
        raise ConfigError(
            f"--num-layers is {args.num_layers}; {said} {'leave' if rest > 0 else 'take'} {abs(rest)} layers "
            f"{'that no stage has' if rest > 0 else 'more than there are'}: with --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size} they must sum to {args.num_layers}."
        )
    parts = middle_stages * (args.virtual_pipeline_model_parallel_size or 1)
    if parts and ((rest + counted) % parts or rest + counted < parts):
        raise ConfigError(
            f"--num-layers is {args.num_layers}; {said} leave {rest + counted} layers for the other {middle_stages} "
            f"stages{' and their virtual stages' if parts != middle_stages else ''}, which must divide "
            f"evenly{_nearest_last(args, rest, middle_stages)}."
        )


def _nearest_last(args: Namespace, rest: int, middle_stages: int) -> str:
    """A last stage with which it comes out even, in words; nothing when there is none."""
    last = args.decoder_last_pipeline_num_layers
    if args.virtual_pipeline_model_parallel_size or last is None:
        return ""
    candidates = [
        other
        for other in range(1, rest + last)
        if (rest + last - other) % middle_stages == 0 and rest + last - other >= middle_stages
    ]
    if not candidates:
        return ""
    best = min(candidates, key=lambda other: abs(other - last))
    return f", as they would with --decoder-last-pipeline-num-layers {best}"


def _check_layout_string(args: Namespace) -> None:
    layers = num_layers_of_layout(args.pipeline_model_parallel_layout)
    if layers != args.num_layers:
        raise ConfigError(
            f"--pipeline-model-parallel-layout {args.pipeline_model_parallel_layout!r} has {layers} decoder layers "
            f"(t); the model has --num-layers {args.num_layers}."
        )
