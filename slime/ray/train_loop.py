"""The driver: the steps shared by both training loops.

    train.py                                     train_async.py
    generate k -> train k -> save -> push        generate k + 1 during train k -> save -> wait -> push
        ^                             |              ^                                            |
        +--- evaluate <- report <-----+              +--------- evaluate <- report <--------------+

    driver --generate, eval, save, offload, onload--> RolloutManager --> engines
    driver --train, save, push----------------------> RayTrainGroup ---> ranks --weights--> engines

The loops decide the order; this module implements each step.  Every step goes through :meth:`TrainJob.step`, which
times it; a driver that survives failures overrides that method.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import ray

from slime.flags.observability import TrackingConfig
from slime.observability import telemetry
from slime.observability.metric_utils import compute_rollout_step
from slime.observability.metrics_file import metrics_path
from slime.observability.step_line import StepLine
from slime.observability.telemetry import Timer, event, span
from slime.observability.text_log import configure_logger
from slime.ray.engines.deadlines import ROLLOUT_MARGIN_S, memory_timeout_s
from slime.ray.gpus import create_placement_groups
from slime.ray.parts import Parts, load_all
from slime.ray.save_lock import lock_outputs
from slime.ray.startup import create_rollout_manager, create_training_models, make_actor, save_position
from slime.ray.trainers import Trainers
from slime.ray.utils import cluster_has_accelerators
from slime.ray.waiting import forget_all, unwatched, wait_for
from slime.utils.misc import Box, should_run_periodic_action

logger = logging.getLogger(__name__)

T = TypeVar("T")
ENGINES_ANSWER_S = 5.0
"""Deadline in seconds for a sink's query, such as a metrics page, which omits the engines without an answer."""


@dataclass
class Generation:
    """A rollout in progress."""

    rollout_id: int
    ref: ray.ObjectRef
    """Reference to its train data."""


def ask_engines(manager: Any, function: Callable[..., T]) -> T:
    """Call ``function(engines)`` in the manager's process and return its result; for sink threads.

    Does not use ``wait_for``, because only the loop's thread may react to deaths and SIGTERM.
    """
    answer: T = ray.get(manager.run.remote(function), timeout=ENGINES_ANSWER_S)
    return answer


def tell_if_finished(load: str, start_rollout_id: int, num_rollout: int) -> None:
    """Log a warning if a resumed run has nothing left to train."""
    if 0 < num_rollout <= start_rollout_id:
        logger.warning(
            "Nothing left to train: --load %s already has all %d rollouts; raise --num-rollout to continue.",
            load, num_rollout,
        )  # fmt: skip


class TrainJob:
    """A running job: its engines, its trainers, and the steps of the loop.

    Args:
        args: complete flags.
        parts: the implementations that ``slime.compose`` chose.
    """

    def __init__(self, args: Namespace, parts: Parts) -> None:
        configure_logger()
        self.args, self.parts = args, parts
        self._locks = lock_outputs(args, parts.outputs)
        self._step_began = time.time()
        self.start_parts()
        self.push_weights()
        facts = {"num_rollout": args.num_rollout, "has_gpus": cluster_has_accelerators()}
        event("start", rollout=args.start_rollout_id, **facts)
        tell_if_finished(args.load, args.start_rollout_id, args.num_rollout)
        span("start", self._step_began, time.time())
        self._step_began = time.time()
        Timer().reset()

    def start_parts(self) -> None:
        """Reserve GPUs, and start engines and trainers."""
        args = self.args
        self.gpus = create_placement_groups(args)
        telemetry.start(args, "driver", load_all(self.parts.sinks), primary=True)
        self._step_began = time.time()
        rollout_gpus, actor_gpus = self.gpus["rollout"], self.gpus["actor"]
        assert rollout_gpus is not None and actor_gpus is not None
        self.actor = make_actor(args, actor_gpus, self.parts)
        # Engines take about a minute to start; meanwhile the trainer's processes import their libraries.
        self.manager, self.rollouts_per_epoch = create_rollout_manager(
            args, rollout_gpus, self.actor.begin, self.parts
        )
        telemetry.offer(lambda function: ask_engines(self.manager, function))
        self._step_line = StepLine(metrics_path(TrackingConfig.of(args)), num_rollout=args.num_rollout)
        actor, critic = create_training_models(args, self.gpus, self.manager, self.actor)
        self.trainers = Trainers(actor, critic, num_critic_only_steps=args.num_critic_only_steps)
        beside = self.parts.evaluation
        self._background = beside.load()(args, self.manager, self.actor) if beside is not None else None

    # Steps

    def step(self, name: str, work: Callable[[], T], *, needs_trainer: bool = True) -> T:
        """Return ``work()`` and add its time to the step ``name``.

        Args:
            name: the step's name in metrics and spans.
            work: the step.  A driver that survives failures may call it several times, so a failed call must change
                nothing or be idempotent.
            needs_trainer: False if no trainer rank has to be alive, as when waiting for the manager.
        """
        with span(name):
            return work()

    def start_generate(self, rollout_id: int) -> Generation:
        """Start rollout ``rollout_id`` without waiting; :meth:`finish_generate` waits for it."""
        return Generation(rollout_id, self.manager.generate.remote(rollout_id))

    def finish_generate(self, generation: Generation) -> list[Box] | None:
        """Wait for a rollout in progress and return its train data."""
        return self._wait_for_engines("wait_for_rollout", generation.ref, what="the rollout", report_every_s=60)

    def generate(self, rollout_id: int) -> list[Box] | None:
        """Run rollout ``rollout_id`` and return its train data."""
        return self.finish_generate(self.start_generate(rollout_id))

    def train(self, rollout_id: int, rollout_data: list[Box]) -> None:
        """Train on one rollout, after taking over the GPUs if they are shared with the engines."""
        self._on_shared_gpus("offload", "offload")
        self.step("train", lambda: self.trainers.train(rollout_id, rollout_data))
        self._ask("train", "record_trained", rollout_id, what="the ledger")

    def save_if_due(self, rollout_id: int) -> None:
        """Save if ``--save-interval`` is due, and after the last rollout."""
        args = self.args
        is_due = should_run_periodic_action(rollout_id, args.save_interval, self.rollouts_per_epoch, args.num_rollout)
        if is_due and not args.debug_rollout_only:
            self.save(rollout_id)

    def save(self, rollout_id: int, *, is_last: bool = False) -> None:
        """Save a checkpoint and let observers drop records that it makes obsolete.

        Args:
            rollout_id: the last rollout trained on.
            is_last: True if these processes end after the save, so that nothing may be written in the background.
        """
        is_last = is_last or rollout_id == self.args.num_rollout - 1
        # The data position is not a separate step: if a trainer dies, the whole save must repeat before publishing.
        position = partial(save_position, self.args, self.manager, rollout_id)
        self.step("save", lambda: self.trainers.save(rollout_id, position, force_sync=is_last))
        self._ask("save", "record_published", rollout_id, what="the ledger")
        event("save", rollout=rollout_id)

    def push_weights(self) -> None:
        """Push the current weights to the engines, and hand the GPUs over to them if shared."""
        args = self.args
        if args.debug_rollout_only:
            return
        if not args.offload_train:
            self.step("push", self.actor.clear_memory)
        # A trainer that exits between steps does so first; the push then has the engines take its memory.
        if not self.actor.leaves_between_steps:
            self._on_shared_gpus("push", "onload_weights")
        self.step("push", self.actor.update_weights)
        self._on_shared_gpus("push", "onload_kv")
        event("push", seconds=round(Timer().seconds("push"), 3))

    def evaluate(self, rollout_id: int | None = None) -> None:
        """Evaluate the current policy on the evaluation sets.

        Without ``rollout_id``, evaluate the loaded weights and print the line of the step that made them: 0 for
        weights not yet trained.
        """
        last = self.args.start_rollout_id - 1 if rollout_id is None else rollout_id
        self._wait_for_engines("eval", self.manager.eval.remote(max(last, 0)), what="the evaluation")
        if rollout_id is None:
            print(self._step_line.line(last, compute_rollout_step(self.args, last)), flush=True)

    def evaluate_if_due(self, rollout_id: int) -> None:
        """Evaluate if ``--eval-interval`` is due; with background evaluation, only start it."""
        if not should_run_periodic_action(rollout_id, self.args.eval_interval, self.rollouts_per_epoch):
            return
        if self._background is None:
            self.evaluate(rollout_id)
            return
        with span("begin_eval"):
            self._background.begin(rollout_id)

    def report(self, rollout_id: int) -> None:
        """Log the driver's timings of the step and print the step's line."""
        if self._background is not None:
            self._background.raise_if_failed()
        seconds, now = Timer().log_dict(), time.time()
        Timer().reset()
        if "train_critic" in seconds:
            seconds["train"] -= seconds["train_critic"]
        metrics: dict[str, float] = {f"perf/time_{name}_s": value for name, value in seconds.items()}
        metrics["perf/time_step_s"] = now - self._step_began
        step = compute_rollout_step(self.args, rollout_id)
        telemetry.log(metrics | {"rollout/step": step}, "rollout/step")
        span("step", self._step_began, now, rollout=rollout_id)
        self._step_began = now
        print(self._step_line.line(rollout_id, step), flush=True)

    def finish(self) -> None:
        """Wait for background evaluation, then stop engines, routers and trainers, and close the logs."""
        if self._background is not None:
            # The trainer is done, so the death of a rank no longer matters.
            with unwatched(self.trainers.names):
                self._background.finish()
        forget_all()
        self._ask("finish", "dispose", what="the engines to stop", timeout_s=self.args.shutdown_timeout_s * 2)
        for trainer in self.trainers.all:
            trainer.release(flushes=True)
        event("finish")
        telemetry.stop()
        for lock in self._locks:
            lock.release()

    # Waits

    def _on_shared_gpus(self, step: str, method: str) -> None:
        """Call one of the manager's memory methods if trainer and engines share GPUs.

            generate -> offload -> train (wakes itself, sleeps at its end) -> onload_weights -> push -> onload_kv

        On a CPU machine the same calls are made; no memory moves.
        """
        if self.args.offload_rollout and not self.args.debug_train_only:
            timeout_s = memory_timeout_s(self.args.engine_start_timeout_s, self.args.weight_update_timeout_s)
            self._ask(step, method, what=f"the engines' memory ({method})", timeout_s=timeout_s)

    def _ask(self, step: str, method: str, *arguments: Any, what: str, timeout_s: float | None = None) -> Any:
        """Call a method of the manager once, even if the wait for it is repeated."""
        ref, timeout_s = getattr(self.manager, method).remote(*arguments), timeout_s or self.args.train_timeout_s
        return self.step(step, lambda: wait_for(ref, what=what, timeout_s=timeout_s), needs_trainer=False)

    def _wait_for_engines(self, step: str, ref: ray.ObjectRef, *, what: str, report_every_s: float = 30.0) -> Any:
        """Wait for generation; engines that restart meanwhile get the weights."""

        def wait() -> Any:
            return wait_for(
                ref,
                what=what,
                timeout_s=self.args.rollout_timeout_s + 2 * ROLLOUT_MARGIN_S,
                report_every_s=report_every_s,
                meanwhile=self.serve_new_engines if self.actor.push.restarts_engines else None,
            )

        return self.step(step, wait, needs_trainer=False)

    def serve_new_engines(self) -> None:
        """Push the weights to engines that replaced dead ones; called while waiting for a rollout."""
        self.actor.push.serve_new_engines()
