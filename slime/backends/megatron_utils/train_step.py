"""One optimizer step over packed micro-batches, and the steps of one rollout."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config
from torch import Tensor

from slime.backends.megatron_utils.adam import parts_of
from slime.backends.megatron_utils.cp_utils import packing_of
from slime.backends.megatron_utils.data import DataIterator, current_device, get_batch, sample_columns
from slime.backends.megatron_utils.forward import run_microbatches, run_model
from slime.backends.megatron_utils.layers.mtp import mtp_inputs, send_embedding_to_mtp
from slime.backends.megatron_utils.layers.router import attach_routed_samples, routers_need_samples
from slime.backends.megatron_utils.loss import loss_function
from slime.backends.megatron_utils.train_metrics import reduce_step_metrics
from slime.observability.pulse import Pulse
from slime.observability.telemetry import DeviceTimes, span, wants
from slime.train_data.device_batch import DeviceBatch
from slime.utils.errors import StepError
from slime.utils.misc import call_hook

_KEYS = (
    "multimodal_train_inputs",
    "host_tokens",
    "log_probs",
    "ref_log_probs",
    "values",
    "advantages",
    "returns",
    "rollout_log_probs",
    "teacher_log_probs",
    "teacher_top",
    "rollout_mask_sums",
    "partition",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
)
"""Columns passed to every loss function besides tokens, lengths and masks.  Missing columns are None; user-defined
per-sample columns are appended."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Metrics of one optimizer step."""

    metrics: dict[str, float]
    """Means over the step, on the last pipeline stage; empty on other stages."""
    grad_norm: float
    """Global gradient norm before clipping."""
    learning_rates: tuple[float, ...]
    """Rate that the step took, by parameter group."""
    is_applied: bool
    """False if the optimizer skipped the step because the gradient was not finite."""
    not_finite_ranks: tuple[int, ...] = ()
    """If the step was skipped: the ranks whose loss was not finite, among this rank and its replicas."""


def _not_finite(moment: str, what: str, value: float) -> StepError:
    return StepError(
        f"{moment}: the {what} is {value} on rank {dist.get_rank()}. Look at the data of that rollout "
        "(--save-debug-rollout-data keeps it), the learning rate and --clip-grad; --on-nan skip skips such steps "
        "instead, --on-nan rollback goes back to a checkpoint"
    )


@dataclass(frozen=True, slots=True)
class OptimizerSteps:
    """Takes the optimizer steps of one rank."""

    args: Namespace
    model: Sequence[torch.nn.Module]
    """The model chunks of this rank."""
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    """Learning rate and weight decay.  Each applied step advances it by the step's global batch size."""

    def take(
        self,
        rollout_id: int,
        data: DeviceBatch,
        iterators: Sequence[DataIterator],
        *,
        loss_type: str,
        on_step: Callable[[int, StepResult], None],
    ) -> None:
        """Take all optimizer steps of one rollout.

        Args:
            iterators: one per chunk; they are reset.
            loss_type: key of ``loss.LOSSES``.
            on_step: called after each step with its number and its result.

        Raises:
            StepError: the loss or the gradient is not finite (unless --on-nan skip), or ranks that must hold the same
                weights hold different ones.  The step has not changed the weights.
        """
        for iterator in iterators:
            iterator.reset()
        for chunk in self.model:
            chunk.train()
        wire_schedules(self.model, self.optimizer, align_grad_reduce=self.args.align_grad_reduce)
        if self.args.reset_optimizer_states:
            reset_optimizer_states(self.optimizer)
        for step_id, sizes in enumerate(zip(data["num_microbatches"], data["global_batch_sizes"], strict=True)):
            with recorded_step(self.model, self.optimizer):
                result = self._take_one(rollout_id, step_id, iterators, *sizes, loss_type=loss_type)
            on_step(step_id, result)
            Pulse().mark(None)

    def _take_one(
        self,
        rollout_id: int,
        step_id: int,
        iterators: Sequence[DataIterator],
        num_microbatches: int,
        step_global_batch_size: int,
        *,
        loss_type: str,
    ) -> StepResult:
        """Accumulate the gradients of all micro-batches, then step the optimizer and the scheduler."""
        args, model, optimizer = self.args, self.model, self.optimizer
        moment = f"rollout {rollout_id}, optimizer step {step_id}"
        _zero_gradients(model, optimizer)
        if path := args.custom_megatron_before_train_step_hook_path:
            flag = "--custom-megatron-before-train-step-hook-path"
            call_hook(flag, path, args, rollout_id, step_id, list(model), optimizer, self.scheduler)
        reports = accumulate_gradients(
            args, moment, iterators, model, num_microbatches, step_global_batch_size, loss_type=loss_type
        )
        marks = Marks.gather(model, [report["loss"] for report in reports])
        with optimizer_time(model):
            is_applied, grad_norm = _apply_gradients(
                moment,
                optimizer,
                marks,
                max_norm=args.clip_grad,
                # With fp16, overflows are how the loss scale is found, so a skipped step is not an error.
                may_skip=not args.check_for_nan_in_loss_and_grad or args.fp16,
            )
        learning_rates = tuple(group["lr"] for group in optimizer.param_groups)
        if is_applied:
            self.scheduler.step(increment=step_global_batch_size)
        _zero_gradients(model, optimizer)
        metrics: dict[str, float] = {}
        if mpu.is_pipeline_last_stage(ignore_virtual=True):
            metrics = reduce_step_metrics(
                reports,
                step_global_batch_size=step_global_batch_size,
                per_token=args.calculate_per_token_loss,
                cp_size=mpu.get_context_parallel_world_size(),
                group=mpu.get_data_parallel_group(with_context_parallel=True),
            )
        not_finite = () if is_applied else tuple(sorted({rank for mark in marks for rank in mark.not_finite()}))
        return StepResult(metrics, grad_norm, learning_rates, is_applied, not_finite)


def _zero_gradients(model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def accumulate_gradients(
    args: Namespace,
    moment: str,
    data_iterator: Sequence[DataIterator],
    model: Sequence[torch.nn.Module],
    num_microbatches: int,
    step_global_batch_size: int,
    *,
    loss_type: str,
) -> list[dict[str, Any]]:
    """Run the micro-batches of one step and leave their summed gradients in the gradient buffers.

    Args:
        moment: rollout and step, for error messages.
        data_iterator: one per chunk, positioned at the first micro-batch of the step.
        num_microbatches: micro-batches of the step on this rank.
        step_global_batch_size: rollouts in the step, over all ranks.

    Returns:
        one report per micro-batch on the last pipeline stage, each with its ``loss``; an empty list on other stages.

    Raises:
        StepError: the loss or the gradient is not finite.
    """
    if args.enable_mtp_training:
        send_embedding_to_mtp(model)
    packing = packing_of(args)
    needs_samples = routers_need_samples(get_model_config(model[0]), logs_load=args.log_expert_load)
    per_token = args.calculate_per_token_loss
    keys = list(dict.fromkeys((*_KEYS, *sample_columns(data_iterator[0].rollout_data))))

    def step(iterator: DataIterator, chunk: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = get_batch(iterator, keys, packing)
        if needs_samples:
            attach_routed_samples(batch, packing, num_microbatches, step_global_batch_size, per_token=per_token)
        if args.enable_mtp_training:
            sizes = {"vocab_size": args.vocab_size, "chunk_size": args.log_probs_chunk_size}
            batch["mtp_inputs"] = mtp_inputs(chunk, batch, packing, **sizes)
        logits = run_model(chunk, batch)
        return logits, partial(checked_loss, batch)

    def checked_loss(batch: dict[str, Any], logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        loss, normaliser, report = loss_function(
            args, batch, num_microbatches, step_global_batch_size, loss_type, logits
        )
        if args.check_for_nan_in_loss_and_grad and not torch.isfinite(loss):
            raise _not_finite(moment, "loss", loss.item())
        return loss, normaliser, {**report, "loss": loss.detach()}

    try:
        return run_microbatches(step, model, data_iterator, num_microbatches, packing, forward_only=False)
    except RuntimeError as error:
        if "in local grad norm" not in str(error):  # raised by megatron-core, which does not know the step
            raise
        raise _not_finite(moment, "gradient", math.nan) from error


def _apply_gradients(
    moment: str, optimizer: MegatronOptimizer, marks: Sequence[Marks], *, max_norm: float, may_skip: bool
) -> tuple[bool, float]:
    """Clip and step if the gradient is finite.  Return whether the step was taken, and the norm before clipping."""
    found_inf = bool(optimizer.prepare_grads())
    grad_norm = float(optimizer.get_grad_norm())  # synchronizes with the device, so reading the marks is free
    for mark in marks:
        mark.check(moment)
    if found_inf or not math.isfinite(grad_norm):
        if not may_skip:
            raise _not_finite(moment, "norm of the gradient", grad_norm)
        return False, grad_norm
    if max_norm > 0.0:
        for part in parts_of(optimizer):
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(
                    parameters,
                    max_norm=max_norm,
                    total_norm=grad_norm,
                    use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )
    return bool(optimizer.step_with_ready_grads()), grad_norm


def wire_schedules(model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, *, align_grad_reduce: bool) -> None:
    """Set the hooks of the model config that communicate gradients and parameters."""
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.timers = None
    config.finalize_model_grads_func = finalize_model_grads
    if not isinstance(model[0], DistributedDataParallel):
        return

    def per_chunk(name: str) -> Any:
        functions = [getattr(chunk, name) for chunk in model]
        return functions if len(functions) > 1 else functions[0]

    ddp = model[0].ddp_config
    if ddp.overlap_grad_reduce:
        config.no_sync_func = per_chunk("no_sync")
        if align_grad_reduce:
            config.grad_sync_func = per_chunk("start_grad_sync")
    if ddp.overlap_param_gather and ddp.align_param_gather:
        config.param_sync_func = per_chunk("start_param_sync")


def reset_optimizer_states(optimizer: MegatronOptimizer) -> None:
    """Zero the moments and the step count of every parameter."""
    for part in parts_of(optimizer):
        adam = part.optimizer
        # With --optimizer-cpu-offload, state loaded from a checkpoint is in the sub-optimizers until the first step.
        for inner in adam.sub_optimizers if isinstance(adam, HybridDeviceOptimizer) else [adam]:
            for state in inner.state.values():
                for name in ("exp_avg", "exp_avg_sq", "step"):
                    if isinstance(state.get(name), Tensor):
                        state[name].zero_()
                    elif name in state:
                        state[name] = 0


# Seconds of forward, backward, communication and the optimizer, for the run's record.
#
# megatron-core's schedules start and stop timers.  Here each timer is a pair of events on the device's stream, read
# after the step.  Communication that overlaps with a pass (a gather, a reduction) counts towards the pass.


PARTS = ("forward", "backward", "communication", "optimizer")
"""Parts of a step, each summed over its micro-batches; their spans follow one another in this order."""
_GATHER = "params-all-gather"


class _StepTimes:
    """The timers of one step, with the interface of megatron-core's ``Timers``."""

    def __init__(self) -> None:
        self._times = DeviceTimes()
        self._open: dict[str, AbstractContextManager[None]] = {}
        self._name = ""

    def __call__(self, name: str, log_level: int | None = None) -> _StepTimes:
        self._name = name
        return self

    def start(self, barrier: bool = False) -> None:
        """Start the timer named in the last call; ``barrier`` is ignored."""
        if (part := _part_of(self._name)) is not None:
            self._open[self._name] = self._times.span(part, current_device())
            self._open[self._name].__enter__()

    def stop(self, barrier: bool = False) -> None:
        if self._name in self._open:
            self._open.pop(self._name).__exit__(None, None, None)

    def optimizer(self) -> AbstractContextManager[None]:
        """Count the body towards the optimizer, including the parameter gathers in it."""
        return self._times.span("optimizer", current_device())

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part.  Synchronizes with the device.

        Parameter gathers, which run inside the optimizer, are moved to "communication".
        """
        found = self._times.seconds()
        gather = found.pop(_GATHER, 0.0)
        found["communication"] = found.get("communication", 0.0) + gather
        found["optimizer"] = max(0.0, found.get("optimizer", 0.0) - gather)
        return found


def _part_of(name: str) -> str | None:
    if name in ("forward-compute", "backward-compute"):
        return name.partition("-")[0]
    if name == _GATHER:
        return name  # within the optimizer
    is_sent = any(word in name for word in ("-send", "-recv", "grads-sync", "all-reduce"))
    return "communication" if is_sent else None


@contextmanager
def recorded_step(model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> Iterator[None]:
    """Record how the body, one optimizer step, divides its time, if a sink wants details."""
    if not wants("details"):
        yield
        return
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    configs: list[Any] = [get_model_config(model[0]), *(part.config for part in parts)]
    times, began = _StepTimes(), time.time()
    for config in configs:
        config.timers = times
    try:
        yield
    finally:
        for config in configs:
            config.timers = None
    record_parts(times.seconds(), began, time.time())


def optimizer_time(model: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
    """Count the body towards the optimizer inside :func:`recorded_step`; do nothing if the step is not recorded."""
    timers: Any = get_model_config(model[0]).timers
    return timers.optimizer() if isinstance(timers, _StepTimes) else nullcontext()


def record_parts(seconds: dict[str, float], began: float, ended: float) -> None:
    """Record the parts of a step as consecutive spans within it."""
    scale = min(1.0, (ended - began) / max(sum(seconds.values()), 1e-9))
    for name in PARTS:
        until = began + seconds.get(name, 0.0) * scale
        span(name, began, until)
        began = until


# Checks of each step: replicas hold the same weights, and every rank's loss is finite.
#
# megatron-core's sharded optimizer gives every rank of a data-parallel group the same gradient norm, whatever a rank
# computed.  Only a rank's copy of the weights shows that it has diverged.


@dataclass(frozen=True, slots=True)
class Marks:
    """Weight checksums and non-finite losses of the ranks of one group.  Reading them synchronizes with the device."""

    ranks: list[int]
    table: Tensor
    """[2 * num_ranks] int64 on the device, two entries per rank: the checksum of its weights, and the number of its
    micro-batches whose loss is not finite."""

    @classmethod
    def gather(cls, model: Sequence[torch.nn.Module], losses: Sequence[Tensor]) -> list[Marks]:
        """Exchange marks within the group that replicates the dense weights and the one that replicates the experts.

        Does not synchronize with the device: read the marks after something that does anyway.

        Args:
            losses: one scalar per micro-batch on the last pipeline stage; empty on other stages.
        """
        weights = [weight for chunk in model for weight in chunk.parameters() if weight.requires_grad]
        experts = [weight for weight in weights if not getattr(weight, "allreduce", True)]
        dense = [weight for weight in weights if getattr(weight, "allreduce", True)]
        gathered = []
        for replicated, group in (
            (dense, mpu.get_data_parallel_group(with_context_parallel=True)),
            (experts, mpu.get_expert_data_parallel_group()),
        ):
            if replicated:
                num_ranks = dist.get_world_size(group)
                not_finite = _num_not_finite(losses, replicated[0].device)
                # A rank without replicas has nothing to compare, so it need not read all its weights in each step.
                checksum = _checksum(replicated) if num_ranks > 1 else torch.zeros_like(not_finite)
                mine = torch.stack([checksum, not_finite])
                table = mine.new_empty(num_ranks * 2)
                dist.all_gather_into_tensor(table, mine, group=group)
                gathered.append(cls(dist.get_process_group_ranks(group), table))
        return gathered

    def check(self, moment: str) -> None:
        """Check that all ranks hold the same weights.

        Raises:
            StepError: they differ; the message names the ranks that deviate from the majority.
        """
        sums = self.table.tolist()[::2]
        counts = Counter(sums).most_common()
        if len(counts) == 1:
            return
        is_tie = counts[0][1] == counts[1][1]
        others = [rank for rank, value in zip(self.ranks, sums, strict=True) if is_tie or value != counts[0][0]]
        who = f"ranks {others} hold weights that differ" if is_tie else f"ranks {others} hold other weights than most"
        raise StepError(
            f"{moment}: {who}, of ranks {self.ranks}, which must hold the same. Check the GPUs and memory of their "
            "nodes; --on-nan rollback goes back to a checkpoint instead of ending the run"
        )

    def not_finite(self) -> list[int]:
        return [rank for rank, count in zip(self.ranks, self.table.tolist()[1::2], strict=True) if count]


@torch.no_grad()
def _checksum(weights: Sequence[Tensor]) -> Tensor:
    """Sum the bit patterns of the weights' fp32 norms, int64: equal for equal weights, changed by any update."""
    norms = torch.stack(torch._foreach_norm(list(weights), 2, dtype=torch.float32))
    return norms.view(torch.int32).sum(dtype=torch.int64)


def _num_not_finite(losses: Sequence[Tensor], device: torch.device) -> Tensor:
    if not losses:
        return torch.zeros((), dtype=torch.int64, device=device)
    return (~torch.stack([loss.detach() for loss in losses]).isfinite()).sum()
