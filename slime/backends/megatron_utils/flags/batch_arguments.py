"""Does a step's batch divide over the data-parallel ranks?  What the first step would find out."""

from __future__ import annotations

from argparse import Namespace

from slime.utils.errors import ConfigError

_MAY_GIVE_OTHER_COUNTS = (
    "custom_generate_function_path",
    "custom_convert_samples_to_train_data_path",
    "load_debug_rollout_data",
    "load_forge_rollout_data",
)
"""With one of these a rollout may have another number of samples than the flags say."""


def check_batch_arguments(args: Namespace) -> None:
    """Refuse a batch that cannot be dealt out; ``args`` are complete.

    Raises:
        ConfigError: with the flags, their values and what is allowed.
    """
    values = vars(args)
    if not values.get("global_batch_size") or any(values.get(name) for name in _MAY_GIVE_OTHER_COUNTS):
        return
    samples, ranks = args.global_batch_size, args.data_parallel_size
    if samples < ranks:
        raise ConfigError(
            f"--global-batch-size {samples} is less than the {ranks} data-parallel ranks ({args.world_size} GPUs / "
            f"model parallelism), and every rank needs a sample in each step; use at least {ranks}, or raise "
            "--tensor-model-parallel-size, --pipeline-model-parallel-size or --context-parallel-size."
        )
    if values.get("use_dynamic_batch_size"):
        return
    size = values.get("micro_batch_size") or 1
    multiple = ranks * (args.microbatch_group_size_per_vp_stage if args.virtual_pipeline_model_parallel_size else 1)
    count = -(-samples // size)
    if count % multiple:
        raise ConfigError(
            f"--global-batch-size {samples} makes {count} micro-batches of --micro-batch-size {size}, no multiple of "
            f"{multiple} (data-parallel ranks, times the virtual-pipeline group); use --use-dynamic-batch-size, or a "
            f"--global-batch-size that is a multiple of {multiple * size}."
        )
