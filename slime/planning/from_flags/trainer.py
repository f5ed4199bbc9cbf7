"""The trainer's part of a plan: what decides its memory, and what a rank of each pipeline stage holds."""

from __future__ import annotations

from argparse import Namespace

from slime.planning.activations import MicroBatch, Recompute, chunk_activations
from slime.planning.parallel import ParallelSizes
from slime.planning.parameters import chunk_parameters
from slime.planning.plan import StagePlan
from slime.planning.stages import StageChunk
from slime.planning.traffic import StepWork
from slime.planning.trainer_memory import GIB, TrainerSettings, rank_memory
from slime.train_data.model_dims import ModelDims

TRAINER_ASLEEP_BYTES = int(0.8 * GIB)
GROUPS_ASLEEP_BYTES = int(1.3 * GIB)
"""What a sleeping trainer keeps on the card, and what it keeps more with other ranks beside it (measured)."""


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


def micro_batch_tokens(args: Namespace, sizes: ParallelSizes, work: StepWork | None) -> int:
    """Tokens of the largest micro-batch on one context-parallel rank: a sample that is longer is one by itself."""
    longest = longest_sample(args) if work is None else work.longest
    if args.use_dynamic_batch_size:
        per_rank = max(args.max_tokens_per_gpu, -(-longest // sizes.context))
    else:
        per_rank = -(-longest * args.micro_batch_size // sizes.context)
    multiple = args.data_pad_size_multiplier * sizes.tensor
    return -(-per_rank // multiple) * multiple


def longest_sample(args: Namespace) -> int:
    """The longest sample that the flags allow, a prompt of unknown length left out."""
    if args.rollout_max_context_len is not None:
        return int(args.rollout_max_context_len)
    return int((args.rollout_max_response_len or 0) + (args.rollout_max_prompt_len or 0)) or int(args.seq_length)


def plan_stage(
    args: Namespace, number: int, chunks: list[StageChunk], shape: ModelDims, sizes: ParallelSizes,
    settings: TrainerSettings,
) -> StagePlan:  # fmt: skip
    """Stage ``number``: its layers, and the parameters and memory of one rank."""
    count = chunk_parameters(chunks, shape, sizes, has_router_bias=bool(args.moe_router_enable_expert_bias))
    memory = rank_memory(chunks, number, count, shape, sizes, settings)
    layers = [layer for chunk in chunks for layer in chunk.layers]
    once = [chunk_activations((layer,), shape, sizes, settings.batch, Recompute()).kept for layer in layers]
    forward = memory.static + memory.details.get("logits", 0) + max(once, default=0)
    return StagePlan(
        number, [chunk.as_text() for chunk in chunks], layers[0] + 1 if layers else None, len(layers), count, memory,
        forward,
    )  # fmt: skip


def trainer_bytes_beside_engine(args: Namespace, sizes: ParallelSizes) -> int:
    """What a trainer that is not working keeps on an engine's card."""
    if not args.colocate or args.debug_rollout_only:
        return 0
    return TRAINER_ASLEEP_BYTES + (GROUPS_ASLEEP_BYTES if sizes.world > 1 else 0) + push_buffer_bytes(args)


def push_buffer_bytes(args: Namespace) -> int:
    """The bucket that an engine on the same card maps: it stays, asleep and awake."""
    return int(args.update_weight_buffer_size) if args.colocate and not args.debug_train_only else 0
