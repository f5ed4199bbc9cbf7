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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from slime.flags.security import job_secret
from slime.observability.job_state import JobState
from slime.observability.logging_utils import configure_logger, finish_tracking, init_tracking, log
from slime.observability.metric_utils import compute_rollout_step
from slime.observability.metrics_file import StepLine, metrics_path
from slime.observability.run_record import event, span, start_recording, stop_recording
from slime.ray.background_eval import BackgroundEvaluation
from slime.ray.engines.fleet import DEADLINE_MARGIN_S
from slime.ray.engines.memory import memory_timeout_s
from slime.ray.gpus import create_placement_groups
from slime.ray.parts import Parts
from slime.ray.preemption import NOTICE
from slime.ray.released_trainer import RELEASE_GRACE_S
from slime.ray.save_lock import lock_outputs
from slime.ray.startup import (
    MANAGER,
    create_manager_again,
    create_rollout_manager,
    create_training_models,
    make_actor,
)
from slime.ray.trainer_gpus import TrainerGpus
from slime.ray.trainer_recovery import NOTICE_S, TrainerRecovery
from slime.ray.utils import cluster_has_accelerators, listen_address
from slime.ray.waiting import find_death, forget, forget_all, unwatched, wait_for
from slime.utils.errors import EngineDiedError, ProcessError
from slime.utils.misc import Box, should_run_periodic_action

if TYPE_CHECKING:
    from slime.observability.prometheus_page import MetricsPage

logger = logging.getLogger(__name__)

JOB_STATE_TIMEOUT_S = 5.0
"""For a scrape of the Prometheus page; what the manager does not say then is left out."""


@dataclass
class Generation:
    """A rollout that was begun."""

    rollout_id: int
    ref: ray.ObjectRef
    """Of its train data; another one where its manager died and was started again."""


class TrainJob:
    """A running job: engines, trainers, and the steps that a loop takes with them.

    Args:
        args: complete flags.
        parts: the implementations that ``slime.compose`` chose for them.
    """

    def __init__(self, args: Namespace, parts: Parts) -> None:
        configure_logger()
        self.args = args
        self._locks = lock_outputs(args)
        gpus = create_placement_groups(args)
        start_recording(Namespace(**vars(args) | init_tracking(args)), "driver", primary=True)
        self._step_began = time.time()
        self._seconds: dict[str, float] = {}
        rollout_gpus, actor_gpus = gpus["rollout"], gpus["actor"]
        assert rollout_gpus is not None and actor_gpus is not None
        self._rollout_gpus = rollout_gpus
        actor = make_actor(args, actor_gpus, parts)
        # Engines start for a minute; the trainer's processes import their libraries in that time.
        self.manager, self.rollouts_per_epoch = create_rollout_manager(args, rollout_gpus, meanwhile=actor.begin)
        self._step_line = StepLine.follow(args)
        self._metrics_page = self._serve_metrics() if args.prometheus_port is not None else None
        self.actor, self.critic = create_training_models(args, gpus, self.manager, actor)
        self._recovery = TrainerRecovery(
            args, self.actor, self._train, self.critic, TrainerGpus(args, gpus), self._save_unsaved
        )
        self._unsaved: int | None = None
        """The last rollout that was trained on since the last save."""
        NOTICE.grace_s, NOTICE.save = args.preemption_grace_s, self._save_and_leave
        NOTICE.lets_go = self._recovery.can_let_go
        self._background: BackgroundEvaluation | None = None
        if args.eval_in_background and not args.debug_train_only:
            self._background = BackgroundEvaluation(args, self.manager, self.actor)
        self.push_weights()
        event("start", rollout=args.start_rollout_id, num_rollout=args.num_rollout)
        span("start", self._step_began, time.time())
        self._step_began = time.time()

    def _serve_metrics(self) -> MetricsPage:
        from slime.observability.prometheus_page import LoggedMetrics, MetricsPage

        names = [dataset.name for dataset in self.args.eval_datasets or ()]
        logged = LoggedMetrics(metrics_path(self.args), names)
        return MetricsPage(
            self.args.prometheus_port,
            logged,
            self._job_state,
            host=listen_address(),
            secret=job_secret(self.args),
        )

    def _job_state(self) -> JobState:
        # In a thread of the page, so not by wait_for: deaths, and SIGTERM to ranks, are the loop's to see.
        state: JobState = ray.get(self.manager.get_job_state.remote(), timeout=JOB_STATE_TIMEOUT_S)
        return state

    def offload_engines(self) -> None:
        """Have the engines release weights, cache and graphs, so that the trainer fits beside them."""
        self._on_shared_gpus("offload")

    def _on_shared_gpus(self, method: str) -> None:
        """Call one of the manager's memory methods where trainer and engines share GPUs.

            generate -> offload -> train (wakes itself, sleeps at its end) -> onload_weights -> push -> onload_kv

        On a CPU machine the same calls are made; no memory moves.
        """
        if self.args.offload_rollout and not self.args.debug_train_only:
            self._ask(method, what=f"the engines' memory ({method})", timeout_s=memory_timeout_s(self.args))

    # Steps

    def start_generate(self, rollout_id: int) -> Generation:
        """Begin rollout ``rollout_id``; :meth:`finish_generate` waits for it."""
        return Generation(rollout_id, self.manager.generate.remote(rollout_id))

    def finish_generate(self, generation: Generation) -> list[Box] | None:
        """Return the train data of a rollout that was begun; begin it again where its manager has died since."""
        with self._timed("wait_for_rollout"):
            death: EngineDiedError | None = None
            while True:
                try:
                    if death is not None:
                        self._restart_manager(generation.rollout_id, death)
                        generation.ref = self.manager.generate.remote(generation.rollout_id)
                    return self._wait_for_engines(generation.ref, what="the rollout", report_every_s=60)
                except (EngineDiedError, RayError) as error:  # train data that the manager owned is lost with it
                    death = self._manager_death(error)

    def _manager_death(self, error: Exception) -> EngineDiedError:
        """Return the death behind an error, of a manager that can be started again; raise the error of any other."""
        is_on = self.args.trainer_recovery != "off" and not self.args.no_rollout_ledger
        death = find_death([MANAGER], timeout_s=NOTICE_S) if is_on and self._background is None else None
        if death is None:
            raise error
        self._recovery.count(death, error)
        return death

    def _restart_manager(self, rollout_id: int, death: EngineDiedError) -> None:
        """Start the manager and its engines again, up to where ``rollout_id`` can begin.

        What its engines had answered comes back from the ledger, and nothing is drawn again; the trainer keeps its
        weights and pushes them.  A rank that dies meanwhile is started again after it, from the new train data.
        """
        logger.error("%s. It is started again with its engines (--trainer-recovery).", death)
        began, since = time.monotonic(), time.time()
        with unwatched(self._recovery.names):
            self.manager, start = create_manager_again(self.args, self._rollout_gpus, self.actor)
            trained = []
            for earlier in range(start, rollout_id):
                ref = self.manager.generate.remote(earlier)
                trained.append((earlier, wait_for(ref, what="the ledger", timeout_s=self.args.train_timeout_s)))
        self._recovery.keep_instead(trained)
        self._recovery.restart_if_down()
        self.push_weights()
        span("manager_recovery", since, time.time(), rollout=rollout_id)
        logger.warning("The manager is back after %.1f s, at rollout %d.", time.monotonic() - began, rollout_id)

    def generate(self, rollout_id: int) -> list[Box] | None:
        """Run rollout ``rollout_id`` and wait for its train data."""
        return self.finish_generate(self.start_generate(rollout_id))

    def train(self, rollout_id: int, rollout_data: list[Box]) -> None:
        """Take the optimizer steps of one rollout: the critic's first, since the actor's advantages need its values.

        The first ``--num-critic-only-steps`` rollouts train the critic alone.
        """
        with NOTICE.deferred():
            self._recovery.train(rollout_id, rollout_data)
            self._ask("record_trained", rollout_id, what="the ledger")
            self._unsaved = rollout_id

    def _train(self, rollout_id: int, rollout_data: list[Box]) -> None:
        values = None
        if self.critic is not None:
            with self._timed("train_critic"):
                values = self.critic.async_train(rollout_id, rollout_data)
                self.critic.wait_trained(rollout_id, values)
        if self.critic is None or rollout_id >= self.args.num_critic_only_steps:
            with self._timed("train"):
                self.actor.train(rollout_id, rollout_data, external_data=values)

    def save_if_due(self, rollout_id: int) -> None:
        """Save when ``--save-interval`` says so, and after the last rollout.

        The order makes a kill at any moment harmless: the models, then the position in the data with its buffer, and
        last of all the actor's tracker file, which makes the checkpoint count.  A critic is saved with the actor, also
        while only the critic trains, so that every checkpoint is of both; its tracker comes before the actor's, and it
        goes on from the iteration of the actor's whatever its own says.
        """
        args = self.args
        if args.debug_rollout_only:
            return
        is_due = should_run_periodic_action(rollout_id, args.save_interval, self.rollouts_per_epoch, args.num_rollout)
        if not (is_due or args.release_train or self._recovery.must_save):
            return
        with NOTICE.deferred(), self._timed("save"):
            self._save_to_count(rollout_id)

    def _save_to_count(self, rollout_id: int, *, is_last: bool = False) -> None:
        """Save, over deaths of the trainer, and have what the checkpoint makes superfluous dropped."""
        self._recovery.run(lambda: self._save(rollout_id, is_last=is_last))
        self._unsaved = None
        self._recovery.record_saved()
        self._ask("record_published", rollout_id, what="the ledger")
        event("save", rollout=rollout_id)

    def _save_unsaved(self) -> None:
        """Save what was trained since the last checkpoint, to disk before this returns: the trainer is to go."""
        if self._unsaved is not None and self.args.save is not None:
            self._save_to_count(self._unsaved, is_last=True)

    def _save_and_leave(self) -> None:
        """Save what was trained since the last checkpoint; nothing else is done with these processes."""
        rollout_id = self._unsaved
        if rollout_id is None or self.args.save is None:
            return
        if self._recovery.is_down:
            raise ProcessError("the trainer had died and was not yet back where it was")
        if self.args.offload_rollout and cluster_has_accelerators():
            # The engines have the GPUs, and are in the middle of a rollout: they go before the trainer wakes up.
            self._save_position(rollout_id)
            forget(MANAGER)
            ray.kill(self.manager)
            time.sleep(RELEASE_GRACE_S)
            self._write_models(rollout_id, force_sync=True)
            self._publish_models(rollout_id)
        else:
            self._save(rollout_id, is_last=True)
        event("save", rollout=rollout_id)

    def _save(self, rollout_id: int, *, is_last: bool = False) -> None:
        args = self.args
        if self.actor.last_checkpoint == rollout_id:
            return  # a rank died after it counted: writing it again would take it away meanwhile
        is_last = is_last or args.release_train or rollout_id == args.num_rollout - 1  # of these processes
        self._write_models(rollout_id, force_sync=is_last)
        self._save_position(rollout_id)
        self._publish_models(rollout_id)

    def _write_models(self, rollout_id: int, *, force_sync: bool) -> None:
        if self.critic is not None:
            # Not in the background (--async-save): the actor's might be on disk, and count, before it.
            self.critic.write_checkpoint(rollout_id, force_sync=True)
        self.actor.write_checkpoint(rollout_id, force_sync=force_sync)

    def _save_position(self, rollout_id: int) -> None:
        args = self.args
        if args.rollout_global_dataset:
            # Not by _ask: a trainer that dies meanwhile must write again before anything is published.
            position = self.manager.save.remote(rollout_id)
            wait_for(position, what="the position in the data to be saved", timeout_s=args.train_timeout_s)

    def _publish_models(self, rollout_id: int) -> None:
        if self.critic is not None:
            self.critic.publish_checkpoint(rollout_id)
        self.actor.publish_checkpoint(rollout_id)

    def push_weights(self) -> None:
        """Give the engines the present weights (and, where GPUs are shared, the GPUs)."""
        args = self.args
        if args.debug_rollout_only:
            return
        if not args.offload_train:
            self._recovery.run(self.actor.clear_memory)
        with NOTICE.deferred(), self._timed("push"):
            if not args.release_train:  # else the trainer goes first, and has the engines take the room that it left
                self._on_shared_gpus("onload_weights")
            self._recovery.run(self.actor.update_weights)
            self._on_shared_gpus("onload_kv")
        event("push", seconds=round(self._seconds["push"], 3))

    def evaluate(self, rollout_id: int) -> None:
        """Measure the present policy on the evaluation sets."""
        with self._timed("eval"):
            self._wait_for_engines(self.manager.eval.remote(rollout_id), what="the evaluation")

    def evaluate_if_due(self, rollout_id: int) -> None:
        """Evaluate when ``--eval-interval`` says so; in the background, only begin to."""
        if not should_run_periodic_action(rollout_id, self.args.eval_interval, self.rollouts_per_epoch):
            return
        if self._background is None:
            self.evaluate(rollout_id)
            return
        with self._timed("begin_eval"):
            self._background.begin(rollout_id)

    def report(self, rollout_id: int) -> None:
        """Log the driver's own times of the step and print the step's line."""
        if self._background is not None:
            self._background.raise_if_failed()
        seconds, self._seconds = self._seconds, {}
        metrics: dict[str, float] = {f"perf/time_{name}_s": value for name, value in seconds.items()}
        metrics["perf/time_step_s"] = sum(seconds.values())
        step = compute_rollout_step(self.args, rollout_id)
        log(self.args, metrics | {"rollout/step": step}, step_key="rollout/step")
        now = time.time()
        span("step", self._step_began, now, rollout=rollout_id)
        self._step_began = now
        print(self._step_line.line(rollout_id, step), flush=True)
        for alarm in self._step_line.new_alarms:
            event("alarm", name=alarm.name, rollout=alarm.step, text=alarm.text)

    def finish(self) -> None:
        """Stop engines, routers and trainers, and close the logs; an evaluation in the background ends first."""
        if self._background is not None:
            with unwatched(self._recovery.names):  # the trainer is done: a rank that dies now changes nothing
                self._background.finish()
        forget_all()
        if self._metrics_page is not None:
            self._metrics_page.stop()
        self._ask("dispose", what="the engines to stop", timeout_s=self.args.shutdown_timeout_s * 2)
        for trainer in (self.critic, self.actor):
            if trainer is not None:
                trainer.finish()
        event("finish")
        stop_recording()
        finish_tracking(self.args)
        for lock in self._locks:
            lock.release()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start, began = time.monotonic(), time.time()
        yield
        elapsed_s = time.monotonic() - start
        self._seconds[name] = self._seconds.get(name, 0.0) + elapsed_s
        span(name, began, began + elapsed_s)

    def _ask(self, method: str, *arguments: Any, what: str, timeout_s: float | None = None) -> Any:
        """Have the manager do something; a trainer that dies meanwhile does not stop that."""
        ref, timeout_s = getattr(self.manager, method).remote(*arguments), timeout_s or self.args.train_timeout_s
        return self._recovery.run(lambda: wait_for(ref, what=what, timeout_s=timeout_s), needs_trainer=False)

    def _wait_for_engines(self, ref: ray.ObjectRef, *, what: str, report_every_s: float = 30.0) -> Any:
        """Wait for generation; engines that start meanwhile get the weights."""

        def wait() -> Any:
            return wait_for(
                ref,
                what=what,
                timeout_s=self.args.rollout_timeout_s + 2 * DEADLINE_MARGIN_S,
                report_every_s=report_every_s,
                meanwhile=self._serve_new_engines if self.actor.restarts_engines else None,
            )

        return self._recovery.run(wait, needs_trainer=False)

    def _serve_new_engines(self) -> None:
        """Give the weights to engines in the place of dead ones, as long as there is a trainer that has them.

        One that died is started again after the rollout, since the engines have its GPUs; but at once when nothing is
        answered before it gives weights, which the rollout waits for then.
        """
        if self._recovery.is_down:
            if not self._change_memory("offload_idle"):
                return
            self._recovery.restart()
            self._change_memory("onload_idle")
        with NOTICE.deferred():
            self.actor.serve_new_engines()

    def _change_memory(self, method: str) -> Any:
        ref: ray.ObjectRef = getattr(self.manager, method).remote()
        return wait_for(ref, what=f"the engines' memory ({method})", timeout_s=memory_timeout_s(self.args))
