"""One step's work: the schedule of a rollout's samples, the passes over them, and the seconds they take."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.schedule import schedule_config
from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.planning.from_flags.trainer import longest_sample
from slime.planning.parallel import ParallelSizes
from slime.planning.plan import PlanOptions
from slime.planning.traffic import StepWork, reference_lengths, step_work
from slime.utils.errors import SlimeError


def plan_work(args: Namespace, sizes: ParallelSizes, options: PlanOptions, problems: list[str]) -> StepWork | None:
    """What the trainer's scheduler makes of the rollout's samples; None when nothing is trained.

    Batches that cannot be dealt out are appended to ``problems``.
    """
    if args.debug_rollout_only or not args.rollout_batch_size or not args.global_batch_size:
        return None
    num_samples = args.rollout_batch_size * args.n_samples_per_prompt
    lengths = list(options.lengths or reference_lengths(num_samples, longest_sample(args)))
    schedule = schedule_config(
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
            flops=model_dims(args),
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
    from slime.backends.megatron_utils.forward import needs_old_log_probs

    if not args.compute_advantages_and_returns:
        return 0
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    steps = [0] * max(samples // args.global_batch_size, 1)
    has_old = needs_old_log_probs(args, {"num_microbatches": steps, "rollout_log_probs": []})
    return sum(
        map(bool, [args.kl_coef != 0 or args.use_kl_loss, args.use_opd and args.opd_type == "megatron", has_old])
    )


def train_seconds(work: StepWork | None, sizes: ParallelSizes, options: PlanOptions) -> float | None:
    """Seconds of the trainer's passes, the slowest rank's, its waits in the pipeline included."""
    if work is None:
        return None
    rate = sizes.world * options.card.bf16_flops * options.mfu * (1 - work.bubble)
    return work.hardware_flops * work.imbalance / rate
