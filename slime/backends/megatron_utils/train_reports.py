"""A trainer's log of rollouts, optimizer steps and their timings; its self-checks; and its data dumps."""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from torch import Tensor

from slime.backends.megatron_utils import memory, train_metrics
from slime.backends.megatron_utils.cp_utils import whole_responses
from slime.backends.megatron_utils.data import PER_TOKEN_COLUMNS, DataIterator, sample_columns
from slime.backends.megatron_utils.flags.hf_config_check import read_hf_config
from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.parameters import weights_digest
from slime.backends.megatron_utils.train_metrics import TOKEN_COLUMNS
from slime.backends.megatron_utils.train_step import StepResult
from slime.observability import telemetry
from slime.observability.dumps import LAYOUT, save_train_dump
from slime.observability.metric_utils import compute_rollout_step
from slime.observability.telemetry import Timer
from slime.train_data.device_batch import DeviceBatch
from slime.utils.distributed_utils import gather_on_first
from slime.utils.errors import CheckError, DataError
from slime.utils.safe_pickle import read_torch_file

logger = logging.getLogger(__name__)


class TrainReports:
    """The log of one role.  Call every method on all ranks: the main rank logs, and other ranks get ``{}``."""

    def __init__(self, args: Namespace, role: str, *, world_size: int) -> None:
        self._args, self._role, self._world_size = args, role, world_size
        self._checks = SelfChecks(args, role)
        self._dims = model_dims(args, read_hf_config(args.hf_checkpoint) if args.hf_checkpoint else None)
        self._num_skipped = 0

    def rollout(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Log and check the metrics of a rollout before training on it."""
        if train_metrics.is_main_rank():
            self._log(rollout_id, metrics)
            self._checks.rollout(rollout_id, metrics)

    def step(
        self, rollout_id: int, step_id: int, result: StepResult, more: Mapping[str, float], *, data: DeviceBatch
    ) -> dict[str, float]:
        """Log and check one optimizer step.

        Args:
            more: further metrics, without a prefix.
        """
        if not result.is_applied:
            self._num_skipped += 1
            culprits = list(result.not_finite_ranks) or "unknown"
            logger.warning(
                "Rollout %d, step %d was skipped: its gradient is not finite (ranks whose loss is not: %s).",
                rollout_id, step_id, culprits,
            )  # fmt: skip
        if not train_metrics.is_main_rank():
            return {}
        skipped = {"skipped_steps": float(self._num_skipped)} if self._args.on_nan[0] == "skip" else {}
        metrics = train_metrics.step_metrics(
            self._role,
            {**result.metrics, **more, **skipped},
            grad_norm=result.grad_norm,
            learning_rates=result.learning_rates,
            step_global_batch_size=data.global_batch_sizes[step_id],
            train_step=rollout_id * len(data.num_microbatches) + step_id,
        )
        telemetry.log(metrics, "train/step", self._args)
        self._checks.step(rollout_id, step_id, result.metrics, result.grad_norm)
        return metrics

    def performance(self, rollout_id: int, data: DeviceBatch, iterator: DataIterator) -> dict[str, float]:
        """Log the seconds of all timers since the last call, throughput and memory.  Collective."""
        seconds = Timer().log_dict()
        Timer().reset()
        metrics = train_metrics.perf_metrics(
            data,
            iterator,
            seconds,
            dims=self._dims,
            frozen_passes=Counter(policy.timer for policy in self._args.frozen_policies),
            max_tokens_per_gpu=self._args.max_tokens_per_gpu if self._args.use_dynamic_batch_size else None,
            world_size=self._world_size,
        )
        if torch.cuda.is_available():
            metrics["perf/train_peak_memory_gib"] = memory.peak_gib()
        if telemetry.wants("ranks"):
            metrics |= train_metrics.rank_metrics(sum(data.total_lengths), seconds)
        return self._log_perf(rollout_id, metrics)

    def span(self, rollout_id: int, name: str, **more: float) -> dict[str, float]:
        """Log the seconds of one timer, and reset it."""
        elapsed_s = Timer().seconds(name)
        Timer().reset(name)
        return self._log_perf(rollout_id, {f"perf/{name}_time": elapsed_s, f"perf/time_{name}_s": elapsed_s, **more})

    def keep_tokens(self, iterator: DataIterator) -> None:
        """Make the loss keep its log-probs and clipped tokens, if a sink wants details."""
        if telemetry.wants("details"):
            iterator.kept = {}

    def record(
        self, rollout_id: int, data: DeviceBatch, trained: Mapping[int, Mapping[str, Sequence[Tensor]]] | None
    ) -> None:
        """Send the log-probs, advantages and clipped tokens of this rank's samples to sinks that want details.
        Collective over context-parallel ranks.

        Args:
            trained: micro-batch -> columns kept by the loss.  Its log-probs are recorded if ``data`` has none.
        """
        is_writer = mpu.is_pipeline_last_stage(ignore_virtual=True) and mpu.get_tensor_model_parallel_rank() == 0
        if not (telemetry.wants("details") and is_writer):
            return
        micro_batches = data.micro_batch_indices
        columns = {"trainer_log_probs": data.log_probs, "advantages": data.get("advantages")}
        if trained and all(trained.get(number) for number in range(len(micro_batches))):
            places = [index for indices in micro_batches for index in indices]
            for name in trained[0]:
                values = [value for number in range(len(micro_batches)) for value in trained[number][name]]
                if columns.get(name) is None:
                    columns[name] = [value for _, value in sorted(zip(places, values), key=lambda pair: pair[0])]
        kept: dict[str, Sequence[Tensor]] = {}
        for name, column in columns.items():
            if column:
                column = [value.detach() for value in column]
                whole = whole_responses(column, data.total_lengths, data.response_lengths)
                kept[name] = torch.cat(whole).float().cpu().split([len(value) for value in whole])
        if kept and mpu.get_context_parallel_rank() == 0:
            positions = list(data.partition or range(len(data.total_lengths)))
            number = {index: i for i, indices in enumerate(micro_batches) for index in indices}
            numbers = [number.get(index, -1) for index in range(len(data.total_lengths))]
            facts = {"positions": positions, "columns": kept, "micro_batches": numbers}
            telemetry.samples("trained", rollout_id=rollout_id, rank=mpu.get_data_parallel_rank(), **facts)

    def record_weights(self, rollout_id: int, model: Sequence[torch.nn.Module]) -> None:
        """Record a digest of the weights after a rollout's steps.  Collective over all ranks."""
        if not telemetry.wants("details"):
            return
        digest = weights_digest(model)
        if dist.get_rank() == 0:
            threads = torch.get_num_threads()
            telemetry.event("weights", rollout=rollout_id, digest=digest, threads=threads, role=self._role)

    def _log_perf(self, rollout_id: int, metrics: Mapping[str, float]) -> dict[str, float]:
        if not train_metrics.is_main_rank():
            return {}
        if self._role != "actor":
            metrics = {name.replace("perf/", f"perf/{self._role}-"): value for name, value in metrics.items()}
        return self._log(rollout_id, metrics)

    def _log(self, rollout_id: int, metrics: Mapping[str, float]) -> dict[str, float]:
        step = compute_rollout_step(self._args, rollout_id)
        telemetry.log({**metrics, "rollout/step": step}, "rollout/step", self._args)
        return dict(metrics)


# ``--save-debug-train-data``: the rollout's columns from all ranks, as one file.


def dump_train_data(
    template: str, rollout_id: int, rollout_data: DeviceBatch, token_columns: Sequence[str] = TOKEN_COLUMNS
) -> None:
    """Write the data that the rollout was trained on.  Collective over all ranks; rank 0 writes."""
    shards = gather_on_first(_shard_of_this_rank(rollout_data, token_columns))
    if shards is not None:
        known = sorted((shard for shard in shards if shard is not None), key=lambda shard: shard["dp_rank"])
        try:
            path = save_train_dump(template, rollout_id, 0, known)
            logger.info("Train data of rollout %d: %s", rollout_id, path)
        except DataError as error:  # training does not depend on a dump
            logger.error("%s The run continues without this dump.", error)


@torch.no_grad()
def _shard_of_this_rank(rollout_data: DeviceBatch, token_columns: Sequence[str]) -> dict[str, Any] | None:
    """Return the samples of this data-parallel rank on one of its ranks, None on the others: tensor- and
    context-parallel rank 0 of the last pipeline stage has them.
    """
    if not mpu.is_pipeline_last_stage(ignore_virtual=True) or mpu.get_tensor_model_parallel_rank() != 0:
        return None
    names = [name for name in sample_columns(rollout_data) if name not in LAYOUT]
    lengths = rollout_data.total_lengths, rollout_data.response_lengths
    columns: dict[str, list[Any]] = {}
    for name in names:
        values = list(rollout_data[name])
        is_cut = name in (*PER_TOKEN_COLUMNS, *token_columns) or name.endswith(("log_probs", "entropy"))
        if is_cut and mpu.get_context_parallel_world_size() > 1:
            values = whole_responses(values, *lengths)
        columns[name] = [value.detach().cpu() if isinstance(value, Tensor) else value for value in values]
    if mpu.get_context_parallel_rank() != 0:
        return None
    samples = [{name: columns[name][index] for name in names} for index in range(len(lengths[0]))]
    layout = {name: rollout_data.get(name) for name in LAYOUT}
    return {
        "dp_rank": mpu.get_data_parallel_rank(),
        "rank": dist.get_rank(),
        **layout,
        "partition": list(rollout_data.partition or range(len(samples))),
        "raw_reward": rollout_data.raw_reward,
        "samples": samples,
    }


# Self-checks of every run.  A violation is a warning, with ``--ci-test`` an error:
#
# * the first step of a rollout is on policy: ``ppo_kl`` is 0;
# * before the first update policy and reference are equal: ``kl_loss`` and ``rollout/kl`` are 0.
#
# ``--ci-test`` also checks that trainer and engines agree (``train_rollout_logprob_abs_diff``), that the MTP loss is
# below 1, and with ``--ci-load-grad-norm`` that the gradient norm equals the one saved with ``--ci-save-grad-norm``.


ZERO = 1e-8
"""KL, in nats, below which two policies count as equal."""
MTP_LOSS_LIMIT = 1.0
GRAD_NORM_TOLERANCE = 0.01
"""Relative or absolute, whichever allows more."""

_NOT_THE_REFERENCE = (
    f"before the first update it must be below {ZERO:g}, because policy and reference have the same weights: is "
    "--ref-load what training began with, and is it loaded the same way? (--ci-disable-kl-checker)"
)


class SelfChecks:
    """The self-checks of one role, run on the main rank."""

    def __init__(self, args: Namespace, role: str) -> None:
        self._args, self._role = args, role

    def step(self, rollout_id: int, step_id: int, metrics: Mapping[str, float], grad_norm: float) -> None:
        """Check one optimizer step; with ``--ci-save-grad-norm`` also save its gradient norm.

        Raises:
            CheckError: with ``--ci-test``; names every metric that fails a check.
        """
        args, role = self._args, self._role
        where = f"{role}, rollout {rollout_id}, step {step_id}"
        problems = list(self._off_policy_at_the_start(rollout_id, step_id, metrics))
        if not args.ci_test:
            _warn(where, problems)
            return
        limit = args.ci_train_rollout_logprob_abs_diff_threshold
        name = "train_rollout_logprob_abs_diff"
        if name in metrics and not metrics[name] < limit:
            problems.append(f"{name} is {metrics[name]:g}; --ci-train-rollout-logprob-abs-diff-threshold is {limit:g}")
        if "mtp_loss" in metrics and not metrics["mtp_loss"] < MTP_LOSS_LIMIT:
            problems.append(f"mtp_loss is {metrics['mtp_loss']:g}; it must be below {MTP_LOSS_LIMIT:g}")
        names = {"role": role, "rollout_id": rollout_id, "step_id": step_id}
        if args.ci_save_grad_norm is not None:
            path = Path(args.ci_save_grad_norm.format(**names))
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(grad_norm, path)
        if args.ci_load_grad_norm is not None:
            problems += _wrong_grad_norm(Path(args.ci_load_grad_norm.format(**names)), grad_norm)
        if problems:
            raise CheckError(f"CI check of {where}: " + "; ".join(problems) + ".")

    def rollout(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Check the metrics of a rollout before its first step.

        Raises:
            CheckError: with ``--ci-test``.
        """
        args, role = self._args, self._role
        kl = metrics.get("rollout/kl")
        is_recomputed = not (args.use_rollout_logprobs or args.keep_old_actor)
        if role != "actor" or args.kl_coef == 0 or kl is None or not is_recomputed or args.ci_disable_kl_checker:
            return
        if self._starts_from_reference(rollout_id) and not abs(kl) < ZERO:
            problem = f"rollout/kl is {kl:g}; {_NOT_THE_REFERENCE}"
            if args.ci_test:
                raise CheckError(f"CI check of {role}, rollout {rollout_id}: {problem}.")
            _warn(f"{role}, rollout {rollout_id}", [problem])

    def _off_policy_at_the_start(self, rollout_id: int, step_id: int, metrics: Mapping[str, float]) -> Iterator[str]:
        args = self._args
        if self._role != "actor" or step_id != 0 or args.loss_type != "policy_loss" or args.ci_disable_kl_checker:
            return
        # If the old log-probs are the engine's or another policy's, the first step is not on policy by definition.
        is_on_policy = not (args.use_rollout_logprobs or args.keep_old_actor)
        if is_on_policy and "ppo_kl" in metrics and not abs(metrics["ppo_kl"]) < ZERO:
            yield (
                f"ppo_kl is {metrics['ppo_kl']:g}; at the first step of a rollout it must be below {ZERO:g}, because "
                "no weight has changed since the log-probs were recomputed. The two forward passes saw different "
                "weights, tokens or experts, or compute differently (--ci-disable-kl-checker)"
            )
        if self._starts_from_reference(rollout_id) and "kl_loss" in metrics and not abs(metrics["kl_loss"]) < ZERO:
            yield f"kl_loss is {metrics['kl_loss']:g}; {_NOT_THE_REFERENCE}"

    def _starts_from_reference(self, rollout_id: int) -> bool:
        """Return True if the actor has the weights of ``--ref-load``: before its first update, if both load the same
        checkpoint.  ``--ci-test`` assumes that they do.
        """
        args = self._args
        if args.use_rollout_routing_replay:
            return False  # the weights are equal, but only the policy replays the engine's experts
        first = args.num_critic_only_steps if args.use_critic else 0
        return rollout_id == first and (args.ci_test or (args.ref_load is not None and args.load == args.ref_load))


def _warn(where: str, problems: list[str]) -> None:
    for problem in problems:
        logger.warning("Self-check of %s: %s.", where, problem)


def _wrong_grad_norm(path: Path, grad_norm: float) -> Iterator[str]:
    if not path.exists():
        yield f"{path} of --ci-load-grad-norm does not exist; another run must have written it (--ci-save-grad-norm)"
        return
    saved = float(read_torch_file(path))
    if not math.isclose(grad_norm, saved, rel_tol=GRAD_NORM_TOLERANCE, abs_tol=GRAD_NORM_TOLERANCE):
        yield f"grad_norm is {grad_norm:g}, and was {saved:g} in the run that wrote {path}"
