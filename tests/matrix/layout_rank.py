"""The work of one rank in a layout cell: a step, and training, through the real trainer, and the comparison.

Imported by the pool before its processes are forked, so all that a cell needs is imported here at the top.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils import initialize
from slime.backends.megatron_utils.advantages import compute_advantages_and_returns
from slime.backends.megatron_utils.data import current_device, get_data_iterator
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.megatron_to_hf import hf_form
from slime.backends.megatron_utils.model import build_model, build_optimizer, build_scheduler
from slime.backends.megatron_utils.model_transform import added_parameters
from slime.backends.megatron_utils.train_metrics import reduce_step_metrics
from slime.backends.megatron_utils.train_step import OptimizerSteps, StepResult, wire_schedules
from slime.backends.megatron_utils.update_weight.gather import iter_hf_tensors
from slime.compose import parts
from slime.ray.parts import load_all
from slime.utils.types import RolloutBatch
from tests.matrix import trainer
from tests.matrix.batch import make_train_data
from tests.matrix.case import FamilyCase, read_config
from tests.matrix.parity import differing_tensors, gradient_errors

COMMON: tuple[object, ...] = (
    *("--loss-type", "policy_loss", "--use-kl-loss", "--kl-loss-coef", 0.05, "--kl-loss-type", "k3"),
    *("--entropy-coef", 0.01, "--lr", 1e-2),
    # Adam's first step is the sign of the gradient, which depends on summation order where it is nearly zero.
    *("--adam-eps", 1.0),
)
"""A loss in which every term has a gradient, and an optimizer whose step is a smooth function of it."""
NUM_ROLLOUTS = 2


@dataclass
class Measured:
    """The results of a run in some layout."""

    numbers: dict[str, float] = field(default_factory=dict)
    """Loss and other metrics of every step, and the norms of the gradients."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the first step, by checkpoint name."""
    merged: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of a weight push of a model with adapters."""
    log_probs: list[Tensor] = field(default_factory=list)
    """Log-probs of every sample, before training and after."""
    export_problems: list[str] = field(default_factory=list)
    """Tensors of a weight push that are not those of the checkpoint."""


def one_process(case: FamilyCase, folder: str, flags: Sequence[object]) -> None:
    """Run the case without parallelism and write its results beside the checkpoint."""
    measured = measure(case, Path(folder) / "hf", flags)
    name = reference_name(flags)
    torch.save(measured.numbers, Path(folder) / f"{name}.pt")
    save_file(measured.gradients, Path(folder) / f"{name}.gradients.safetensors")
    save_file(measured.merged, Path(folder) / f"{name}.merged.safetensors")
    save_file({str(i): x for i, x in enumerate(measured.log_probs)}, Path(folder) / f"{name}.log_probs.safetensors")


def reference_name(flags: Sequence[object]) -> str:
    """File name for the flags that change the numbers themselves, not only the layout."""
    return "reference" + "".join(str(flag) for flag in flags).replace("/", "_")


def compare(case: FamilyCase, folder: str, flags: Sequence[object], loss_flags: Sequence[object]) -> dict[str, Any]:
    """Run the case under this layout on every rank and compare with :func:`one_process`.

    Returns:
        the worst relative difference of gradients (this rank's), metrics and log-probs, and where each occurs.
    """
    measured = measure(case, Path(folder) / "hf", [*loss_flags, *flags])
    name = reference_name(loss_flags)
    numbers = torch.load(Path(folder) / f"{name}.pt")
    gradients = load_file(Path(folder) / f"{name}.gradients.safetensors")
    log_probs = load_file(Path(folder) / f"{name}.log_probs.safetensors")
    worst: dict[str, tuple[float, str]] = {}
    errors = gradient_errors(measured.gradients, gradients)
    worst["gradients"] = max((error, tensor) for tensor, error in errors.items())
    if measured.merged:
        errors = gradient_errors(measured.merged, load_file(Path(folder) / f"{name}.merged.safetensors"))
        worst["merged weights"] = max((error, tensor) for tensor, error in errors.items())
    worst["weight push"] = (float(len(measured.export_problems)), "; ".join(measured.export_problems[:3]))
    if "--bf16" in loss_flags:
        # All gradients together, because single small ones are full of rounding; trained weights are not
        # compared.  The loss has a bound 20 times tighter than gradients.
        differences = [(measured.gradients[key] - value).norm() for key, value in gradients.items()]
        norms = torch.stack([value.norm() for value in gradients.values()])
        worst["gradients"] = (float(torch.stack(differences).norm() / norms.norm()), "all parameters together")
        if measured.numbers:
            expected = numbers["before/loss"]
            worst["20 x"] = (20 * abs(measured.numbers["before/loss"] - expected) / abs(expected), "before/loss")
        return worst
    if measured.numbers:
        # Metrics that are differences of nearly equal numbers are compared on the scale of the loss, or of its terms
        # if these happen to cancel.
        scale = max(abs(numbers[key]) for key in ("0/loss", "0/pg_loss") if key in numbers)
        worst["metrics"] = max(
            (_nan_is_worst(abs(measured.numbers[key] - value) / max(abs(value), scale)), key)
            for key, value in numbers.items()
        )
    if measured.log_probs:
        worst["log-probs"] = max(
            (
                _nan_is_worst(float((value - log_probs[str(i)]).abs().max() / log_probs[str(i)].abs().max())),
                f"pass {i}",
            )
            for i, value in enumerate(measured.log_probs)
        )
    return worst


def _nan_is_worst(value: float) -> float:
    return math.inf if math.isnan(value) else value


def export_differences(case: FamilyCase, args: Namespace, model: Sequence[torch.nn.Module], source: Path) -> list[str]:
    """The tensors of a live export that differ from the checkpoint in any bit: all on every rank, or each
    stage's own, as the two kinds of weight push need them."""
    expected = case.read_pushed(source)
    model_name = read_config(source)["model_type"]
    everywhere = {n: t.clone().cpu() for n, t in iter_hf_tensors(hf_form(args, model_name), model, dtype=None)}
    own = iter_hf_tensors(hf_form(args, model_name), model, dtype=None, across_stages=False)
    stages: list[dict[str, Tensor]] = [{}] * mpu.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(stages, {n: t.clone().cpu() for n, t in own}, group=mpu.get_pipeline_model_parallel_group())
    joined = {name: tensor for stage in stages for name, tensor in stage.items()}
    if args.bf16:  # a push rounds nothing: the model holds the checkpoint's values in its own precision
        expected = {n: t.to(everywhere[n].dtype) if n in everywhere else t for n, t in expected.items()}
    return [*differing_tensors(everywhere, expected), *differing_tensors(joined, expected)]


def start(case: FamilyCase, source: Path, flags: Sequence[object]) -> Namespace:
    """Complete args, parallel groups, seeds."""
    args = trainer.make_args(case, source, *COMMON, *flags, world_size=dist.get_world_size())
    initialize.init(args)
    return args


def measure(case: FamilyCase, source: Path, flags: Sequence[object]) -> Measured:
    """Log-probs, the gradients of one step, then two rollouts of training and log-probs again."""
    args = start(case, source, flags)
    model = build_model(args, transforms=load_all(parts(args).transforms))
    load_hf_weights(args, model, source)
    optimizer = build_optimizer(args, model)
    scheduler = build_scheduler(args, optimizer)
    wire_schedules(model, optimizer, align_grad_reduce=args.align_grad_reduce)
    data = trainer.prepare(args, make_train_data(case.vocab_size, add_images=case.add_images))
    trainer.draw_adapters(model)
    result = Measured()
    if added_parameters(model) is not None:  # then a push differs from the checkpoint
        result.merged = {n: t.to("cpu", copy=True).contiguous() for n, t in trainer.export(args, model, dtype=None)}
    else:
        result.export_problems = export_differences(case, args, model, source)

    log_probs = trainer.response_log_probs(args, model, data)
    result.log_probs.append(whole_log_probs(data, log_probs))
    add_policies(data, log_probs)
    compute_advantages_and_returns(args, data)

    reports = trainer.run_backward(args, model, data)
    note_step(args, data, reports, result, "before")
    gather_sharded_gradients(model)
    result.gradients = {name: gradient.cpu() for name, gradient in trainer.model_gradients(args, model).items()}

    def on_step(_: int, outcome: StepResult) -> None:
        result.numbers[f"{rollout}/grad_norm"] = outcome.grad_norm
        result.numbers |= {f"{rollout}/{name}": value for name, value in outcome.metrics.items()}

    for rollout in range(NUM_ROLLOUTS):
        iterators = get_data_iterator(data, len(model))
        steps = OptimizerSteps(args, model, optimizer, scheduler)
        steps.take(rollout, data, iterators, loss_type=args.loss_type, on_step=on_step)
    result.log_probs.append(whole_log_probs(data, trainer.response_log_probs(args, model, data)))
    if not mpu.is_pipeline_last_stage():
        result.numbers, result.log_probs = {}, []
    return result


def note_step(
    args: Namespace, data: RolloutBatch, reports: Sequence[Mapping[str, Any]], result: Measured, name: str
) -> None:
    """Means over the step of what the micro-batches reported."""
    if mpu.is_pipeline_last_stage():
        metrics = reduce_step_metrics(
            reports,
            step_global_batch_size=data["global_batch_sizes"][0],
            per_token=args.calculate_per_token_loss,
            cp_size=mpu.get_context_parallel_world_size(),
            group=mpu.get_data_parallel_group(with_context_parallel=True),
        )
        result.numbers |= {f"{name}/{metric}": value for metric, value in metrics.items()}


def add_policies(data: RolloutBatch, log_probs: Sequence[Tensor]) -> None:
    """A reference and an old policy that differ from the current one, equal for equal tokens in every layout."""
    if not log_probs:
        return
    noise = torch.randn(65536, generator=torch.Generator().manual_seed(5))
    data["ref_log_probs"], data["log_probs"] = [], []
    for position, log_prob in zip(data["partition"], log_probs, strict=True):
        kept = response_positions(data, position, len(log_prob))
        data["ref_log_probs"].append(log_prob + 0.3 * noise[512 * position + kept].to(log_prob.device))
        data["log_probs"].append(log_prob + 0.2 * noise[512 * position + 256 + kept].to(log_prob.device))


def response_positions(data: RolloutBatch, position: int, num_local: int) -> Tensor:
    """The response tokens to which the values on this context-parallel rank belong."""
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    index = data["partition"].index(position)
    length = data["response_lengths"][index]
    kept = slice_log_prob_with_cp(torch.arange(length), data["total_lengths"][index], length)
    assert len(kept) == num_local, (len(kept), num_local)
    return kept


def whole_log_probs(data: RolloutBatch, log_probs: Sequence[Tensor]) -> Tensor:
    """Log-probs of all samples [samples, longest response] over context- and data-parallel ranks, zeros elsewhere."""
    table = torch.zeros(64, 256, device=current_device())
    for position, log_prob in zip(data["partition"], log_probs, strict=bool(log_probs)):
        table[position, response_positions(data, position, len(log_prob))] = log_prob
    dist.all_reduce(table, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return table.cpu()


def gather_sharded_gradients(model: Sequence[torch.nn.Module]) -> None:
    """Gather the gradient buffers if the distributed optimizer left each rank only its shard of every bucket."""
    for chunk in model:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
            for group in groups:
                for bucket in group.buckets:
                    size = group.intra_distributed_optimizer_instance_size
                    shard = bucket.grad_data.chunk(size)[group.intra_distributed_optimizer_instance_rank].clone()
                    dist.all_gather_into_tensor(
                        bucket.grad_data, shard, group=group.intra_distributed_optimizer_instance_group
                    )
