"""The trainer's own loss on real ranks: its results for the cells of ``variants``, to be compared with ``step``.

Parallel state, gathers and gradient collectives are the trainer's; only the model is a table of bigram logits.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.train_data.convert import samples_to_train_data
from slime.train_data.rewards import post_process_rewards
from slime.train_data.schedule import DPSchedule, ScheduleConfig, build_dp_schedule
from slime.train_data.split import split_by_rank
from tests.matrix.pool import RankPool
from tests.oracle.batches import as_samples
from tests.oracle.reference import Example
from tests.oracle.step import teacher_log_probs
from tests.oracle.variants import (
    COLUMNS,
    GROUP_SIZE,
    LAYOUTS,
    PACKINGS,
    ROLLOUTS_PER_STEP,
    arguments,
    problem,
)

if TYPE_CHECKING:
    from slime.backends.megatron_utils.data import DataIterator
    from tests.mutations.mutation import Mutation

Cell = tuple[str, str, str, int]
"""Layout, variant, packing, seed."""

BATCH_KEYS = (
    "tokens",
    "total_lengths",
    "response_lengths",
    "loss_masks",
    "log_probs",
    "ref_log_probs",
    "advantages",
    "returns",
    "values",
    "rollout_log_probs",
    "rollout_mask_sums",
)


def guides_of(args: Namespace) -> list[Any]:
    """Distillation guides of the variant."""
    from slime.compose import GUIDES, chosen
    from slime.ray.parts import load_all

    return [guide(args) for guide in load_all(chosen(args, GUIDES))]


def rollout_of_this_rank(
    args: Namespace, examples: Sequence[Example], packing: str
) -> tuple[dict[str, Any], DPSchedule]:
    """A rank's data before advantages: rewards, schedule and columns are computed as in a run."""
    from megatron.core import mpu

    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
    from slime.backends.megatron_utils.data import prepare_rollout_data

    raw = [example.reward for example in examples]
    rewards = post_process_rewards(
        raw,
        n_samples_per_prompt=GROUP_SIZE,
        rollout_batch_size=2,
        advantage_estimator=args.advantage_estimator,
        rewards_normalization=args.rewards_normalization,
        grpo_std_normalization=args.grpo_std_normalization,
        group_ids=[example.rollout_id // GROUP_SIZE for example in examples],
        rollout_ids=[example.rollout_id for example in examples],
    )
    train_data = samples_to_train_data(as_samples(examples), raw, rewards, rollout_top_p=args.rollout_top_p)
    dp_size, cp_size = mpu.get_data_parallel_world_size(), mpu.get_context_parallel_world_size()
    schedule = build_dp_schedule(
        ScheduleConfig(dp_size=dp_size, cp_size=cp_size, **PACKINGS[packing]),
        [len(tokens) for tokens in train_data.tokens],
        global_batch_size=ROLLOUTS_PER_STEP,
        rollout_indices=train_data.rollout_ids,
    )
    data = prepare_rollout_data(split_by_rank(train_data, schedule)[mpu.get_data_parallel_rank()])
    if mpu.is_pipeline_last_stage():
        picked = [examples[position] for position in data["partition"]]
        columns = {"log_probs": "old", "ref_log_probs": "reference", "values": "values"}
        rows = {name: [torch.tensor(getattr(e, field)) for e in picked] for name, field in columns.items()}
        rows["teacher_log_probs"] = [teacher_log_probs(e).float() for e in picked]
        for name, column in rows.items():
            data[name] = [
                slice_log_prob_with_cp(row, len(e.tokens), e.response_length)
                for row, e in zip(column, picked, strict=True)
            ]
    return data, schedule


def losses_of_a_step(
    args: Namespace,
    iterator: DataIterator,
    table: Tensor,
    num_microbatches: int,
    step_size: int,
) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
    """The loss of each micro-batch as the trainer returns it, divided as by Megatron's schedule.

    With a per-token loss, the division by the number of tokens is left to the end of the step.
    """
    from slime.backends.megatron_utils.cp_utils import packing_of
    from slime.backends.megatron_utils.data import get_batch
    from slime.backends.megatron_utils.loss import loss_function

    keys = list(BATCH_KEYS)
    if args.rollout_top_p != 1.0:
        keys += ["rollout_top_p_token_ids", "rollout_top_p_token_offsets"]
    for _ in range(num_microbatches):
        batch = get_batch(iterator, keys, packing_of(args))
        logits = table[batch["tokens"]]
        scaled, normaliser, report = loss_function(args, batch, num_microbatches, step_size, args.loss_type, logits)
        yield scaled if args.calculate_per_token_loss else scaled / num_microbatches, normaliser, report


def steps_of_this_rank(variant: str, packing: str, seed: int, *, allgather_cp: bool = False) -> dict[str, Any]:
    """This rank's part of a rollout.

    Returns:
        ``advantages``: {sample: whole row}, of this rank's samples; ``steps``: metrics and gradient of each step,
        summed as Megatron sums them; ``shard``: (rank, size) of the tensor-parallel group.  Both are empty before
        the last pipeline stage.
    """
    from megatron.core import mpu

    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp
    from slime.backends.megatron_utils.data import DataIterator
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns
    from slime.backends.megatron_utils.train_metrics import reduce_step_metrics

    args = arguments(variant)
    args.allgather_cp = allgather_cp
    tp_rank, tp_size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    examples, table = problem(args, seed)
    data, schedule = rollout_of_this_rank(args, examples, packing)
    compute_advantages_and_returns(args, data, guides_of(args))
    if not mpu.is_pipeline_last_stage():
        assert "advantages" not in data
        return {"advantages": {}, "steps": [], "shard": (tp_rank, tp_size)}
    advantages = {
        position: all_gather_with_cp(row, len(examples[position].tokens), len(examples[position].mask)).tolist()
        for position, row in zip(data["partition"], data["advantages"], strict=True)
    }
    if args.reuse_log_probs:
        del data["log_probs"]

    is_sharded = args.loss_type != "value_loss"
    if is_sharded:
        table = table[:, tp_rank * COLUMNS // tp_size : (tp_rank + 1) * COLUMNS // tp_size]
    iterator = DataIterator(data, data["micro_batch_indices"])
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    steps = []
    for num_microbatches, step_size in zip(schedule.num_microbatches, schedule.global_batch_sizes, strict=True):
        parameters = table.float().clone().requires_grad_()
        num_tokens = torch.zeros(())
        reports = []
        for loss, normaliser, report in losses_of_a_step(args, iterator, parameters, num_microbatches, step_size):
            loss.backward()
            num_tokens += normaliser
            reports.append(report)
        for tensor in (parameters.grad, num_tokens):
            dist.all_reduce(tensor, group=group)
        metrics = reduce_step_metrics(
            reports,
            step_global_batch_size=step_size,
            per_token=args.calculate_per_token_loss,
            cp_size=mpu.get_context_parallel_world_size(),
            group=group,
        )
        divisor = num_tokens if args.calculate_per_token_loss else dist.get_world_size(group)
        steps.append({"metrics": metrics, "grad": (parameters.grad / divisor).tolist()})
    return {"advantages": advantages, "steps": steps, "shard": (tp_rank, tp_size) if is_sharded else (0, 1)}


def cells_of_this_rank(cells: Sequence[Cell]) -> dict[Cell, dict[str, Any]]:
    """Run cells, layout by layout; the layouts are those of ``variants`` for this many processes."""
    from slime.backends.megatron_utils import cpu_platform  # noqa: F401

    # isort: split
    from megatron.core import mpu

    torch.manual_seed(0)
    results: dict[Cell, dict[str, Any]] = {}
    layouts = LAYOUTS[dist.get_world_size()]
    for layout, sizes in layouts.items():
        chosen = [cell for cell in cells if cell[0] == layout]
        if not chosen:
            continue
        if layout == "one":
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mpu.initialize_model_parallel(**sizes)
        for cell in chosen:
            _, variant, packing, seed = cell
            results[cell] = steps_of_this_rank(variant, packing, seed, allgather_cp="allgather" in layout)
        mpu.destroy_model_parallel()
    return results


def run_cells(
    pool: RankPool, cells: Sequence[Cell], *, mutation: Mutation | None = None, timeout_s: float = 600
) -> dict[Cell, list[dict[str, Any]]]:
    """Run the cells, each on as many processes as its layout has; return the results of its ranks.

    Args:
        pool: starts the processes.
        cells: cells to run; those with the same number of processes share a start.
        mutation: a bug to put into the processes.
        timeout_s: limit for each start.
    """
    results: dict[Cell, list[dict[str, Any]]] = {}
    for world_size, layouts in LAYOUTS.items():
        chosen = [cell for cell in cells if cell[0] in layouts]
        if chosen:
            ranks = pool.run(_cells_with_bug, world_size, chosen, mutation, timeout_s=timeout_s)
            results |= {cell: [rank[cell] for rank in ranks] for cell in chosen}
    return results


def _cells_with_bug(cells: Sequence[Cell], mutation: Mutation | None) -> dict[Cell, dict[str, Any]]:
    with mutation.applied() if mutation is not None else nullcontext():
        return cells_of_this_rank(cells)
