"""The steps that both training loops are made of.

``train.py`` and ``train_async.py`` say in which order; here is what each step does, how long it took, and the line
that is printed when it is done.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from slime.arguments import record_runtime
from slime.observability.logging_utils import configure_logger, finish_tracking, init_tracking, log
from slime.observability.metrics_file import StepLine
from slime.ray.actor_group import RayTrainGroup, ReleasedTrainGroup
from slime.ray.critic import create_critic, scatter_values
from slime.ray.placement_group import GpuSlice, create_placement_groups
from slime.ray.rollout import DEADLINE_MARGIN_S, create_rollout_manager
from slime.ray.utils import cluster_has_accelerators
from slime.ray.waiting import forget_all, wait_for, watch
from slime.utils.errors import ConfigError, ProcessError, WeightSyncError
from slime.utils.misc import Box, should_run_periodic_action

logger = logging.getLogger(__name__)

MAX_FAILED_RESENDS = 3
"""How often, one after the other, new engines may fail to take weights before the run is given up."""


def create_training_models(
    args: Namespace, gpus: dict[str, GpuSlice | None], rollout_manager: Any
) -> tuple[RayTrainGroup | None, RayTrainGroup | None]:
    """Start the trainers and load their models.

    Returns:
        ``(actor, critic)``; no actor with ``--debug-rollout-only``, no critic unless the estimator has one.
    """
    if args.debug_rollout_only:
        record_runtime(args, start_rollout_id=args.start_rollout_id or 0)
        return None, None
    actor_gpus = gpus["actor"]
    assert actor_gpus is not None
    actor = (ReleasedTrainGroup if args.release_train else RayTrainGroup)(
        args,
        args.actor_num_nodes,
        args.actor_num_gpus_per_node,
        actor_gpus,
        role="actor",
        with_ref=args.kl_coef != 0 or args.use_kl_loss,
        with_opd_teacher=args.use_opd and args.opd_type == "megatron",
    )
    start_rollout_id = actor.create()
    critic = None
    if args.critic_args is not None and args.num_rollout != 0:
        critic_gpus = gpus["critic"]
        assert critic_gpus is not None
        critic = create_critic(args, critic_gpus, actor)
    if args.start_rollout_id is None:
        record_runtime(args, start_rollout_id=start_rollout_id)
    actor.set_rollout_manager(rollout_manager)
    if args.rollout_global_dataset:
        wait_for(
            rollout_manager.load.remote(args.start_rollout_id - 1),
            what="the position in the data to be restored",
            timeout_s=args.train_timeout_s,
        )
    return actor, critic


class TrainJob:
    """A running job: engines, trainers, and the steps that a loop takes with them."""

    def __init__(self, args: Namespace) -> None:
        configure_logger()
        self.args = args
        gpus = create_placement_groups(args)
        record_runtime(args, **init_tracking(args))
        self._step_line = StepLine.follow(args)
        self._seconds: dict[str, float] = {}
        self._failed_resends = 0
        rollout_gpus = gpus["rollout"]
        assert rollout_gpus is not None
        self.manager = create_rollout_manager(args, rollout_gpus)
        watch(self.manager, "the rollout manager")
        self.rollouts_per_epoch: int | None = self._ask(
            "get_num_rollout_per_epoch", what="the rollout manager to start"
        )
        self._resolve_num_rollout()
        if args.offload_rollout and cluster_has_accelerators():
            # The engines size their memory by what is free: they must be up before the trainer takes any.
            self._wait_for_engines()
            self.offload_engines()
        self.actor, self.critic = create_training_models(args, gpus, self.manager)
        if not (args.offload_rollout and cluster_has_accelerators()):
            self._wait_for_engines()
        self.push_weights()

    def _resolve_num_rollout(self) -> None:
        args = self.args
        if args.num_rollout is None:
            num_rollout = (self.rollouts_per_epoch or 0) * args.num_epoch
            if num_rollout == 0:
                raise ConfigError(
                    f"--num-epoch {args.num_epoch} gives no rollout: the data set has fewer prompts than "
                    f"--rollout-batch-size {args.rollout_batch_size}. Use a smaller batch, more data or --num-rollout."
                )
            record_runtime(args, num_rollout=num_rollout)

    def offload_engines(self) -> None:
        """Have the engines release weights, cache and graphs, so that the trainer fits beside them."""
        self._on_shared_gpus("offload")

    def _on_shared_gpus(self, method: str) -> None:
        """Call one of the manager's memory methods where trainer and engines share GPUs.

            generate -> offload -> train (wakes itself, sleeps at its end) -> onload_weights -> push -> onload_kv

        On a CPU machine the same calls are made; no memory moves.
        """
        if self.args.offload_rollout and not self.args.debug_train_only:
            self._ask(method, what=f"the engines' memory ({method})", timeout_s=self.args.weight_update_timeout_s)

    def _wait_for_engines(self) -> None:
        self._ask("wait_ready", what="the engines to start", timeout_s=self.args.engine_start_timeout_s + 180)

    # Steps

    def start_generate(self, rollout_id: int) -> ray.ObjectRef:
        """Begin rollout ``rollout_id``; :meth:`finish_generate` waits for it."""
        return self.manager.generate.remote(rollout_id)

    def finish_generate(self, generation: ray.ObjectRef) -> list[Box] | None:
        """Return the train data of a rollout that was begun."""
        with self._timed("wait_for_rollout"):
            return wait_for(
                generation,
                what="the rollout",
                timeout_s=self.args.rollout_timeout_s + 2 * DEADLINE_MARGIN_S,
                report_every_s=60,
                meanwhile=self._serve_new_engines if self._restarts_engines else None,
            )

    @property
    def _restarts_engines(self) -> bool:
        """True when engines may start while a rollout runs, and wait for weights of this job's trainer."""
        return self.args.use_fault_tolerance and self.actor is not None and not self.args.debug_train_only

    def _serve_new_engines(self) -> None:
        """Give engines in the place of dead ones the weights; the trainer is idle while we wait for a rollout."""
        engines = self._ask("get_engines_without_weights", what="the list of new engines")
        if not engines.handles:
            return
        assert self.actor is not None
        try:
            self.actor.resend_weights(engines)
            self._failed_resends = 0
        except (ProcessError, WeightSyncError) as error:
            # It may have died as well: then its monitor reports it, and we are called again.
            self._failed_resends += 1
            if self._failed_resends >= MAX_FAILED_RESENDS:
                raise
            logger.warning("new engines did not take the weights; they will be tried again: %s", error)
        self._report_refusals()

    def generate(self, rollout_id: int) -> list[Box] | None:
        """Run rollout ``rollout_id`` and wait for its train data."""
        return self.finish_generate(self.start_generate(rollout_id))

    def train(self, rollout_id: int, rollout_data: list[Box]) -> None:
        """Take the optimizer steps of one rollout: the critic's first, since the actor's advantages need its values.

        The first ``--num-critic-only-steps`` rollouts train the critic alone.
        """
        assert self.actor is not None, "without a trainer generate() gives no train data"
        values = None
        if self.critic is not None:
            with self._timed("train_critic"):
                values = self.critic.async_train(rollout_id, rollout_data)
                self.critic.wait_trained(rollout_id, values)
                values = scatter_values(values, self.critic.layouts(), self.actor.layouts())
        if self.critic is None or rollout_id >= self.args.num_critic_only_steps:
            with self._timed("train"):
                self.actor.train(rollout_id, rollout_data, external_data=values)
        self._ask("record_trained", rollout_id, what="the ledger")

    def save_if_due(self, rollout_id: int) -> None:
        """Save when ``--save-interval`` says so, and after the last rollout.

        The order makes a kill at any moment harmless: the models, then the position in the data with its buffer, and
        last of all the actor's tracker file, which makes the checkpoint count.  A critic is saved with the actor, also
        while only the critic trains, so that every checkpoint is of both; its tracker comes before the actor's, and it
        goes on from the iteration of the actor's whatever its own says.
        """
        args = self.args
        if self.actor is None:
            return
        is_due = should_run_periodic_action(rollout_id, args.save_interval, self.rollouts_per_epoch, args.num_rollout)
        if not (is_due or args.release_train):
            return
        with self._timed("save"):
            is_last = args.release_train or rollout_id == args.num_rollout - 1  # of these processes
            if self.critic is not None:
                # Not behind training's back (--async-save): the actor's might be on disk, and count, before it.
                self.critic.save_model(rollout_id, force_sync=True)
            self.actor.save_model(rollout_id, force_sync=is_last)
            if args.rollout_global_dataset:
                self._ask("save", rollout_id, what="the position in the data to be saved")
            if self.critic is not None:
                self.critic.publish_checkpoint(rollout_id)
            self.actor.publish_checkpoint(rollout_id)
            self._ask("record_published", rollout_id, what="the ledger")

    def push_weights(self) -> None:
        """Give the engines the present weights (and, where GPUs are shared, the GPUs)."""
        if self.actor is None:
            return
        if not self.args.offload_train:
            self.actor.clear_memory()
        with self._timed("push"):
            if self._restarts_engines:
                # An engine that starts or takes weights answers no probe; the next rollout resumes the monitors.
                self._ask("health_monitoring_pause", what="the health monitors to pause")
            self.actor.hand_over_weights()
            self._on_shared_gpus("onload_weights")
            if self._restarts_engines:
                self._recover_engines()
            self._push_to_engines()
            self._on_shared_gpus("onload_kv")

    def _push_to_engines(self) -> None:
        """Push once; ``--weight-push-failure`` says what becomes of engines that do not take it."""
        assert self.actor is not None
        try:
            self.actor.update_weights()
        except (ProcessError, WeightSyncError) as error:
            # Once more with others in the place of those that failed; a failure of the trainer's stays one.
            if not self._restarts_engines:
                raise
            was_refused = self._report_refusals()
            if not self._ask("find_dead_engines", 0.0 if was_refused else 10.0, what="the state") and not was_refused:
                raise
            logger.warning("no engine took the push; retrying: %s", error)
            self._recover_engines()
            self.actor.update_weights()
        if self._report_refusals() and self._restarts_engines:
            # Where GPUs are shared, others must be up before the trainer takes them; elsewhere that can wait.
            self._recover_engines()
            self._serve_new_engines()

    def _report_refusals(self) -> bool:
        """Tell the manager which engines the last push excluded; return whether there were any.

        Raises:
            WeightSyncError: ``--weight-push-failure`` is stop.
        """
        assert self.actor is not None
        excluded, self.actor.excluded = self.actor.excluded, []
        if excluded:
            self._ask("push_refused", excluded, what="the engines that a push excluded")
        return bool(excluded)

    def _recover_engines(self) -> None:
        """Restart dead engines, and wait for those that the push must meet."""
        timeout_s = 2 * self.args.engine_start_timeout_s + DEADLINE_MARGIN_S
        self._ask("recover_updatable_engines", what="dead engines to be restarted", timeout_s=timeout_s)

    def evaluate(self, rollout_id: int) -> None:
        """Measure the present policy on the evaluation sets."""
        with self._timed("eval"):
            wait_for(
                self.manager.eval.remote(rollout_id),
                what="the evaluation",
                timeout_s=self.args.rollout_timeout_s + 2 * DEADLINE_MARGIN_S,
                meanwhile=self._serve_new_engines if self._restarts_engines else None,
            )

    def evaluate_if_due(self, rollout_id: int) -> None:
        """Evaluate when ``--eval-interval`` says so."""
        if should_run_periodic_action(rollout_id, self.args.eval_interval, self.rollouts_per_epoch):
            self.evaluate(rollout_id)

    def report(self, rollout_id: int) -> None:
        """Log the driver's own times of the step and print the step's line."""
        seconds, self._seconds = self._seconds, {}
        metrics: dict[str, float] = {f"perf/time_{name}_s": value for name, value in seconds.items()}
        metrics["perf/time_step_s"] = sum(seconds.values())
        log(self.args, metrics | {"rollout/step": rollout_id}, step_key="rollout/step")
        print(self._step_line.line(rollout_id), flush=True)

    def finish(self) -> None:
        """Stop engines, routers and trainers, and close the logs."""
        forget_all()
        self._ask("dispose", what="the engines to stop", timeout_s=self.args.shutdown_timeout_s * 2)
        for trainer in (self.critic, self.actor):
            if trainer is not None:
                trainer.release()
        finish_tracking(self.args)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def _ask(self, method: str, *arguments: Any, what: str, timeout_s: float | None = None) -> Any:
        ref = getattr(self.manager, method).remote(*arguments)
        return wait_for(ref, what=what, timeout_s=timeout_s or self.args.train_timeout_s)
