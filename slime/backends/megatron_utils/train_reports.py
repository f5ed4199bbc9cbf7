"""What a trainer logs, and when: each rollout, each optimizer step, the times of both, and single spans."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence

from slime.backends.megatron_utils import memory, train_metrics
from slime.backends.megatron_utils.ci_checks import check_rollout, check_step
from slime.backends.megatron_utils.data import DataIterator
from slime.backends.megatron_utils.train_step import StepResult
from slime.observability.logging_utils import log
from slime.observability.metric_utils import compute_rollout_step
from slime.observability.timer import Timer
from slime.utils.types import RolloutBatch


class TrainReports:
    """The log of one role.  Every method is called on all ranks; the main rank logs, the others get ``{}``.

    Args:
        args: the run's arguments.
        role: a critic's names tell it from the actor's.
        world_size: ranks that share the work.
    """

    def __init__(self, args: Namespace, role: str, *, world_size: int) -> None:
        self._args, self._role, self._world_size = args, role, world_size

    def rollout(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Log what is known of a rollout before it is trained on, and check it."""
        if train_metrics.is_main_rank():
            self._log(rollout_id, metrics)
            check_rollout(self._args, self._role, rollout_id, metrics)

    def step(
        self, rollout_id: int, step_id: int, result: StepResult, more: Mapping[str, float], *,
        learning_rates: Sequence[float], data: RolloutBatch,
    ) -> dict[str, float]:  # fmt: skip
        """Log and check one optimizer step.

        Args:
            result: of the step.
            more: metrics beside the step's own, without a prefix.
            learning_rates: of each group of parameters.
            data: the rollout's, with the sizes of its steps.
        """
        if not train_metrics.is_main_rank():
            return {}
        metrics = train_metrics.step_metrics(
            self._role,
            {**result.metrics, **more},
            grad_norm=result.grad_norm,
            learning_rates=learning_rates,
            step_global_batch_size=data["global_batch_sizes"][step_id],
            train_step=rollout_id * len(data["num_microbatches"]) + step_id,
        )
        log(self._args, metrics, step_key="train/step")
        check_step(self._args, self._role, rollout_id, step_id, result.metrics, result.grad_norm)
        return metrics

    def performance(self, rollout_id: int, data: RolloutBatch, iterator: DataIterator) -> dict[str, float]:
        """Log the seconds of every timer since the last call, throughput and memory.  Collective."""
        seconds = Timer().log_dict()
        Timer().reset()
        metrics = train_metrics.perf_metrics(self._args, data, iterator, seconds, world_size=self._world_size)
        metrics |= memory.peak_metrics()
        return self._log_perf(rollout_id, metrics)

    def span(self, rollout_id: int, name: str, **more: float) -> dict[str, float]:
        """Log the seconds of a timer now, and forget them."""
        elapsed_s = Timer().seconds(name)
        Timer().reset(name)
        return self._log_perf(rollout_id, {f"perf/{name}_time": elapsed_s, f"perf/time_{name}_s": elapsed_s, **more})

    def _log_perf(self, rollout_id: int, metrics: Mapping[str, float]) -> dict[str, float]:
        if not train_metrics.is_main_rank():
            return {}
        if self._role != "actor":
            metrics = {name.replace("perf/", f"perf/{self._role}-"): value for name, value in metrics.items()}
        return self._log(rollout_id, metrics)

    def _log(self, rollout_id: int, metrics: Mapping[str, float]) -> dict[str, float]:
        step = compute_rollout_step(self._args, rollout_id)
        log(self._args, {**metrics, "rollout/step": step}, step_key="rollout/step")
        return dict(metrics)
