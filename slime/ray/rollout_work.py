"""The rollout manager's work: turning prompts into train data, evaluating, and tracking the data position.

This module only orders the calls to the rollout function, the data source and the hooks.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray

from slime.flags.reward import RewardConfig
from slime.observability import telemetry
from slime.observability.dumps import dump_rollout, load_rollout_dump
from slime.observability.rollout_metrics import log_eval, log_rollout
from slime.ray.engines.fleet import EngineFleet
from slime.ray.parts import MakeObserver
from slime.ray.rollout_data import check_fan_out, plug_ins_of_samples, split_for_ranks, train_data_from_samples
from slime.ray.utils import ray_transport
from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn, check_samples, eval_samples, leaf_samples
from slime.rollout.rm_hub.policy import check_graded
from slime.rollout.run_state import CheckpointPosition, RunState, use_run
from slime.utils.errors import ConfigError, ProcessError
from slime.utils.misc import Box, load_function
from slime.utils.plugins import PluginCall, call_plugin


class GenerationClock:
    """The time in which the answers of a rollout were generated, for token rates.

    Args:
        function: the rollout function.  One that keeps groups in flight generates between its calls, too.
    """

    def __init__(self, function: Callable[..., Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._keeps_groups = bool(getattr(function, "keeps_groups_in_flight", False))
        self._clock = clock
        self._began_s = 0.0
        self._last_end_s: float | None = None
        self._generates = False

    def begin(self) -> None:
        """Report that a rollout is asked for."""
        self._began_s, self._generates = self._clock(), False

    def generates(self) -> None:
        """Report that the rollout function is called: the answers come neither from a dump nor from a record."""
        self._generates = True

    def end(self) -> float:
        """Return the seconds when the answers are there; 0 where they were not generated."""
        if not self._generates:
            return 0.0
        now_s = self._clock()
        since_s = self._began_s if self._last_end_s is None or not self._keeps_groups else self._last_end_s
        self._last_end_s = now_s
        return now_s - since_s


class RolloutWork:
    """Owner of the data source and of the rollout functions.

    Args:
        args: the run's arguments.
        engines: watched while a rollout function runs.
        observers: factories for observers of the prompt groups.
    """

    def __init__(self, args: Namespace, engines: EngineFleet, observers: Sequence[MakeObserver] = ()) -> None:
        self.args, self.engines = args, engines
        self.data_source = load_function(args.data_source_path)(args)
        made = [make(args, self.data_source) for make in observers]
        self.run = use_run(RunState((*getattr(self.data_source, "observers", ()), *made)))
        self.generate_rollout = load_function(args.rollout_function_path)
        self.eval_rollout = load_function(args.eval_function_path)
        self.position = CheckpointPosition(self.data_source, self.run.observers)
        self.parallel: dict[str, int] | None = None
        """Sizes of the trainer's parallel groups, by which the train data is split; None until the trainer reports."""
        self.rollout_id = -1
        """The last rollout begun here or in the loaded checkpoint; -1 before the first."""
        self._clock = GenerationClock(self.generate_rollout)

    def generate(self, rollout_id: int) -> list[Box] | None:
        """Run one rollout; see :meth:`RolloutManager.generate`."""
        start = time.monotonic()
        self._clock.begin()
        self.rollout_id = rollout_id
        self.run.begin(rollout_id)
        self.position.begin(rollout_id)
        self.engines.begin_rollout()
        groups, metrics = self._make_samples(rollout_id)
        check_samples(groups, f"The rollout function, {plug_ins_of_samples(self.args) or 'or a dump'}, gave")
        check_fan_out(groups)
        samples = list(leaf_samples(groups))
        times = {"seconds": time.monotonic() - start, "generation_s": self._clock.end()}
        dump_rollout(self.args, rollout_id, samples)
        if times["generation_s"]:
            check_graded(RewardConfig.of(self.args), samples)
        if self.args.debug_rollout_only:
            telemetry.samples("rollout", rollout_id=rollout_id, samples=samples, rewards=None)
            log_rollout(self.args, rollout_id, samples, metrics, **times)
            return None
        if self.parallel is None:
            raise ProcessError("generate() was called before set_train_parallel_config()")
        train_data = train_data_from_samples(self.args, samples)
        rewards = train_data.rewards if len(train_data.rewards) == len(samples) else None
        facts = {"samples": samples, "rewards": rewards, "is_loaded": times["generation_s"] == 0}
        telemetry.samples("rollout", rollout_id=rollout_id, **facts)
        per_rank = split_for_ranks(self.args, train_data, self.parallel)
        log_rollout(self.args, rollout_id, samples, metrics, **times)
        transport = ray_transport(self.args.rollout_data_transport)
        return [Box(ray.put(data, _tensor_transport=transport)) for data in per_rank]

    def _make_samples(self, rollout_id: int) -> tuple[list[Any], dict[str, Any] | None]:
        if self.args.load_debug_rollout_data:
            return load_rollout_dump(
                self.args.load_debug_rollout_data,
                rollout_id,
                subsample=self.args.load_debug_rollout_data_subsample,
                is_trusted=self.args.trust_debug_data,
            ), None
        make = partial(self._call_rollout_fn, rollout_id)
        for observer in self.run.observers:
            make = partial(observer.make_samples, rollout_id, make)
        output = make()
        return output.samples, output.metrics

    def _call_rollout_fn(self, rollout_id: int) -> RolloutFnTrainOutput:
        call = PluginCall("--rollout-function-path", self.args.rollout_function_path)
        work = (self.generate_rollout, self.args, rollout_id, self.data_source)
        self._clock.generates()
        output = self.engines.run_watched(lambda: call_plugin(call, call_rollout_fn, *work, evaluation=False))
        if not isinstance(output, RolloutFnTrainOutput):
            raise ConfigError(
                f"--rollout-function-path {self.args.rollout_function_path} returned {type(output).__name__}; it must "
                "return a RolloutFnTrainOutput or a list of groups"
            )
        return output

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Evaluate the current policy on the evaluation sets; return the logged metrics."""
        start = time.monotonic()
        self.run.begin(rollout_id)
        self.engines.begin_rollout()
        call = PluginCall("--eval-function-path", self.args.eval_function_path)
        work = (self.eval_rollout, self.args, rollout_id, self.data_source)
        with telemetry.span("evaluation", rollout=rollout_id):
            output = self.engines.run_watched(lambda: call_plugin(call, call_rollout_fn, *work, evaluation=True))
        dump_rollout(self.args, rollout_id, eval_samples(output), evaluation=True)
        after = rollout_id if self.rollout_id >= 0 else None  # the argument is 0 before the first rollout too
        telemetry.samples("evaluation", rollout_id=after, data=output.data)
        return log_eval(self.args, rollout_id, output.data, output.metrics, time.monotonic() - start)

    def load(self, rollout_id: int | None) -> None:
        """Restore the data position after ``rollout_id``, and what observers recorded after it."""
        self.data_source.load(rollout_id)
        if rollout_id is not None:
            self.rollout_id = rollout_id
        for observer in self.run.observers:
            observer.start((self.args.start_rollout_id or 0) if rollout_id is None else rollout_id + 1)

    def close(self) -> None:
        """Close the observers."""
        observers, self.run.observers = self.run.observers, ()
        for observer in observers:
            observer.close()
