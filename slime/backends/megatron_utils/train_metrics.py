"""Metrics that need the parallel groups: means over a step and over a rollout, throughput, expert load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from torch import Tensor

from slime.algorithms.value_loss import explained_variance, explained_variance_sums
from slime.backends.megatron_utils import memory
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean, local_responses
from slime.backends.megatron_utils.data import DataIterator, current_device, sum_over_ranks
from slime.backends.megatron_utils.layers.router import Router
from slime.observability.metric_utils import dict_add_prefix
from slime.train_data.device_batch import DeviceBatch
from slime.train_data.model_dims import ModelDims
from slime.utils.distributed_utils import get_gloo_group

TOKEN_COLUMNS = (
    "log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "teacher_log_probs",
    "advantages",
    "returns",
    "values",
    "kl",
    "entropy",
)
"""Columns with one value per response token, logged as the mean over rollouts of each rollout's masked mean."""

_SAMPLE_COLUMNS = ("response_lengths", "total_lengths", "truncated")
"""Columns with one number per sample, logged as plain means, like ``rewards``."""

_FORWARD_PASSES = {"log_probs": 1, "ref_log_probs": 1}
"""Timers of forward passes over the whole rollout, and the number of passes in each."""


def is_main_rank() -> bool:
    """Return True on the rank that logs for the training group: data and tensor rank 0 of the last pipeline stage."""
    return (
        mpu.get_data_parallel_rank(with_context_parallel=True) == 0
        and mpu.get_tensor_model_parallel_rank() == 0
        and mpu.is_pipeline_last_stage(ignore_virtual=True)
    )


def reduce_step_metrics(
    reports: Sequence[Mapping[str, Any]],
    *,
    step_global_batch_size: int,
    per_token: bool,
    cp_size: int,
    group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """Average the micro-batches' reports over an optimizer step.

    Args:
        reports: this rank's reports: ``names`` and ``values`` [trained tokens, metric, ...].
        step_global_batch_size: rollouts in the step, over all ranks; the denominator by default.
        per_token: divide by the trained tokens of the step instead.
        cp_size: context-parallel ranks.  Each counts all tokens of its samples but reports only its share of the sums.
        group: data- and context-parallel ranks; None for a single rank.
    """
    names = reports[0]["names"]
    assert all(report["names"] == names for report in reports), [report["names"] for report in reports]
    sums = torch.stack([report["values"] for report in reports]).double().sum(dim=0)
    if group is not None:
        dist.all_reduce(sums, group=group)
    num_tokens, *values = sums.tolist()
    denominator = num_tokens / cp_size if per_token else step_global_batch_size
    return {name: value / denominator for name, value in zip(names, values, strict=True)}


def rollout_metrics(
    rollout_data: DeviceBatch, token_columns: Iterable[str] = TOKEN_COLUMNS, *, per_token: bool, has_rewards: bool
) -> dict[str, float]:
    """Average every column over the whole rollout: ``rollout/...``.  Collective over data and context parallelism.

    Per-token columns are averaged like the loss, so that ``rollout/log_probs`` agrees with training metrics of the
    same tokens.  Returns an empty dict on all but the last pipeline stage, which has the columns.
    """
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return {}
    reduce = get_sum_of_sample_mean(
        rollout_data.total_lengths,
        rollout_data.response_lengths,
        rollout_data.loss_masks,
        rollout_data.rollout_mask_sums,
        per_token,
    )
    cp_size = mpu.get_context_parallel_world_size()
    num_ranks = mpu.get_data_parallel_world_size(with_context_parallel=True)
    num_rollouts = sum(rollout_data.global_batch_sizes)
    # The ranks' shares add up to the denominator: the number of rollouts, or of trained tokens.
    share = num_rollouts / num_ranks
    if per_token:
        share = float(sum(mask.sum().item() for mask in rollout_data.loss_masks)) / cp_size
    sums: dict[str, list[float]] = {}
    for name in token_columns:
        if rollout_data.get(name) is not None:
            total = float(reduce(torch.cat([values.float() for values in rollout_data[name]])))
            sums[name] = [total, share]
    graded = rollout_data.graded
    has_rewards = has_rewards and (graded is None or any(graded))
    for name in (*_SAMPLE_COLUMNS, "rewards") if has_rewards else _SAMPLE_COLUMNS:
        if rollout_data.get(name) is not None:
            column = [float(value) for value in rollout_data[name]]
            if name == "rewards" and graded is not None and rollout_data.partition is not None:
                column = [value for value, place in zip(column, rollout_data.partition, strict=True) if graded[place]]
            sums[name] = [sum(column), float(len(column))]
    means = _reduce_means(sums)
    if has_rewards and rollout_data.raw_reward is not None:
        raw_reward = rollout_data.raw_reward
        raw = [float(reward) for place, reward in enumerate(raw_reward) if graded is None or graded[place]]
        means["raw_reward"] = sum(raw) / len(raw)
    return dict_add_prefix(means, "rollout/")


def value_metrics(rollout_data: DeviceBatch) -> dict[str, float]:
    """Compute the explained variance of the critic's values over the rollout.

    Collective over data and context parallelism; returns an empty dict on all but the last pipeline stage.
    """
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return {}
    masks = local_responses(rollout_data.loss_masks, rollout_data.total_lengths, rollout_data.response_lengths)
    sums = explained_variance_sums(rollout_data.critic_values, rollout_data.returns, masks).to(current_device())
    dist.all_reduce(sums, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return {"rollout/explained_variance": explained_variance(sums)}


def _reduce_means(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Sum each (total, count) over data- and context-parallel ranks, then divide.  All ranks pass the same names."""
    table = torch.tensor(list(sums.values()), dtype=torch.float64, device=current_device())
    dist.all_reduce(table, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return {name: total / max(count, 1e-12) for name, (total, count) in zip(sums, table.tolist(), strict=True)}


def image_patches(inputs: Iterable[Mapping[str, Any] | None]) -> list[int]:
    """Return the number of patches of every image, and of every frame of a video."""
    grids = [row for one in inputs if one and "image_grid_thw" in one for row in one["image_grid_thw"].tolist()]
    return [int(height * width) for time, height, width in grids for _ in range(int(time))]


def perf_metrics(
    rollout_data: DeviceBatch,
    data_iterator: DataIterator,
    seconds: Mapping[str, float],
    *,
    dims: ModelDims,
    frozen_passes: Mapping[str, int],
    max_tokens_per_gpu: int | None,
    world_size: int,
) -> dict[str, float]:
    """Compute ``perf/...``: seconds of each phase, tokens/s, TFLOP/s, packing efficiency.  Collective.

    Args:
        data_iterator: after training, when it has counted real and packed tokens.
        seconds: elapsed seconds by timer.
        frozen_passes: timer -> forward passes over the whole rollout, for frozen policies other than the reference.
        max_tokens_per_gpu: None if micro-batches have a fixed number of samples.
    """
    num_passes = {**_FORWARD_PASSES, **frozen_passes}
    local = torch.tensor(
        [
            sum(rollout_data.total_lengths),
            data_iterator.num_real_tokens,
            data_iterator.num_packed_tokens,
            float(sum(dims.forward_flops(length) for length in rollout_data.total_lengths)),
            float(dims.tower_flops(image_patches(rollout_data.get("multimodal_train_inputs") or ()))),
        ],
        dtype=torch.float64,
        device=current_device(),
    )
    # All ranks of a context-parallel group have the same counts, hence the division.  The data-parallel group without
    # context parallelism would not need it, but nothing else uses that group, and its communicator would take half a
    # gigabyte of the accelerator.
    dist.all_reduce(local, group=mpu.get_data_parallel_group(with_context_parallel=True))
    num_tokens, real, packed, text, tower = (local / mpu.get_context_parallel_world_size()).tolist()
    metrics: dict[str, float] = {}
    for name, elapsed_s in seconds.items():
        metrics[f"perf/{name}_time"] = elapsed_s
        metrics[f"perf/time_{name}_s"] = elapsed_s
        if elapsed_s > 0 and (name in num_passes or name == "actor_train"):
            is_training = name == "actor_train"
            work = dims.train_flops(text, tower) if is_training else (text + tower) * num_passes[name]
            metrics[f"perf/{name}_tflops"] = work / elapsed_s / world_size / 1e12
    if packed:
        metrics["perf/packing_efficiency"] = real / packed
    if max_tokens_per_gpu is not None:
        # Share of --max-tokens-per-gpu that the micro-batches fill, without padding.
        num_micro_batches = len(rollout_data.micro_batch_indices) * mpu.get_data_parallel_world_size()
        capacity = num_micro_batches * max_tokens_per_gpu * mpu.get_context_parallel_world_size()
        metrics["perf/packing_budget_use"] = num_tokens / capacity
    if seconds.get("actor_train"):
        metrics["perf/actor_train_tok_per_s"] = num_tokens / seconds["actor_train"]
        metrics["perf/train_tok_per_s"] = metrics["perf/actor_train_tok_per_s"]
    if "train_wait" in seconds and "train" in seconds:
        total = seconds["train_wait"] + seconds["train"]
        metrics["perf/step_time"] = total
        metrics["perf/wait_time_ratio"] = seconds["train_wait"] / total if total > 0 else 0.0
    return metrics


def rank_metrics(num_tokens: int, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return ``perf/rank_{n}/...`` of all ranks: seconds, peak memory in GiB, tokens/s.  Collective over all ranks."""
    steps_s = seconds.get("actor_train", 0.0)
    mine = [seconds.get("train", 0.0), memory.peak_gib(), num_tokens / steps_s if steps_s else 0.0]
    group = get_gloo_group()
    table = torch.empty(dist.get_world_size(group), len(mine), dtype=torch.float64)
    dist.all_gather(list(table), torch.tensor(mine, dtype=torch.float64), group=group)
    names = ("step_s", "peak_memory_gib", "tok_per_s")
    return {
        f"perf/rank_{rank}/{name}": value
        for rank, row in enumerate(table.tolist())
        for name, value in zip(names, row, strict=True)
    }


def step_metrics(
    role: str,
    result_metrics: Mapping[str, float],
    *,
    grad_norm: float,
    learning_rates: Sequence[float],
    step_global_batch_size: int,
    train_step: int,
) -> dict[str, float]:
    """Return the metrics of one optimizer step under ``train/...``, or ``train/critic-...`` for the critic."""
    tag = "" if role == "actor" else f"{role}-"
    metrics = {f"train/{tag}{name}": value for name, value in result_metrics.items()}
    metrics[f"train/{tag}grad_norm"] = grad_norm
    for index, rate in enumerate(learning_rates):
        metrics[f"train/{tag}lr-pg_{index}"] = rate
    metrics[f"train/{tag}global_batch_size"] = step_global_batch_size
    metrics["train/step"] = train_step
    return metrics


class ExpertLoad:
    """Counts the tokens that each layer's router sends to each expert, over all ranks."""

    def __init__(self, model: Sequence[torch.nn.Module], num_layers: int, num_experts: int) -> None:
        """Make the routers of ``model`` count, except those of multi-token prediction (MTP)."""
        self._shape = (num_layers, num_experts)
        self._routers = [
            module
            for chunk in model
            for name, module in chunk.named_modules()
            if isinstance(module, Router) and "mtp" not in name.split(".")
        ]
        for router in self._routers:
            router.counts_load = True

    def take_metrics(self) -> dict[str, float]:
        """Return the :func:`load_metrics` of all passes since the last call.  Collective."""
        counts = torch.zeros(self._shape, dtype=torch.int64, device=current_device())
        for router in self._routers:
            if router.load is not None:
                counts[router.layer_number - 1] += router.load.to(counts)
                router.load = None
        return load_metrics(sum_over_ranks(counts))


def load_metrics(counts_LE: Tensor) -> dict[str, float]:
    """Return the expert balance of every layer that routed tokens.

    Args:
        counts_LE: [layers, experts] tokens.

    Returns:
        ``expert_load/layer_{n}/max_over_mean`` (1 is balanced, E is all tokens on one expert) and ``.../idle`` (share
        of the experts without tokens), layers counted from 1; and ``expert_load/worst_max_over_mean`` and
        ``expert_load/worst_idle``, their maxima over the layers.
    """
    metrics: dict[str, float] = {}
    for layer, counts_E in enumerate(counts_LE.double().cpu(), start=1):
        if counts_E.sum() > 0:
            metrics[f"expert_load/layer_{layer}/max_over_mean"] = float(counts_E.max() / counts_E.mean())
            metrics[f"expert_load/layer_{layer}/idle"] = float((counts_E == 0).double().mean())
    for name in ("max_over_mean", "idle") if metrics else ():
        metrics[f"expert_load/worst_{name}"] = max(value for key, value in metrics.items() if key.endswith(name))
    return metrics
