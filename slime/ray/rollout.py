"""The rollout manager: the one actor that owns engines, prompts and samples.

``generate`` turns prompts into train data, ``eval`` measures, ``save``/``load`` keep the position in the data.  What
the rollout function, the data source and the hooks do is theirs; here is only the order.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from functools import partial
from typing import Any

import ray

from slime.observability import telemetry
from slime.observability.dumps import dump_rollout, load_rollout_dump
from slime.observability.logging_utils import configure_logger
from slime.observability.rollout_metrics import log_eval, log_rollout
from slime.ray.distributed_post import start_distributed_post
from slime.ray.engines.fleet import CONTROL_GROUP, EngineFleet, EngineVerbs, start_fleet
from slime.ray.engines.models import JobState
from slime.ray.gpus import GpuSlice
from slime.ray.parts import CORE, Parts
from slime.ray.rollout_data import check_fan_out, plug_ins_of_samples, split_for_ranks, train_data_from_samples
from slime.ray.utils import COMMON_ACTOR_ENV, NOSET_VISIBLE_DEVICES, ray_transport
from slime.ray.waiting import WATCH_GROUP
from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn, check_samples, eval_samples, leaf_samples
from slime.rollout.run_state import CheckpointPosition, RunState, use_run
from slime.utils.async_utils import StallTimeout
from slime.utils.errors import ConfigError, ProcessError
from slime.utils.http_utils import init_http_client
from slime.utils.misc import Box, load_function
from slime.utils.plugins import PluginCall, call_plugin

logger = logging.getLogger(__name__)


class RolloutManager(EngineVerbs):
    """Owner of the engines, the data source and the rollout functions.

    Args:
        args: the run's arguments.
        gpus: those of the engines.
        engines: started here unless given.
        parts: of the run.
    """

    def __init__(
        self, args: Namespace, gpus: GpuSlice, engines: EngineFleet | None = None, parts: Parts = CORE
    ) -> None:
        configure_logger(prefix="rollout")
        self.args = args
        telemetry.start(args, "rollout manager", parts.sinks)
        StallTimeout.seconds = args.loop_stall_timeout_s
        self.engines = engines if engines is not None else start_fleet(args, gpus)
        if not args.debug_train_only:
            init_http_client(args)
            if args.use_distributed_post:
                start_distributed_post(args)
        # Everything below happens while the engines boot.
        self.data_source = load_function(args.data_source_path)(args)
        made = [make(args, self.data_source) for make in parts.observers]
        self.run = use_run(RunState((*getattr(self.data_source, "observers", ()), *made)))
        self.generate_rollout = load_function(args.rollout_function_path)
        self.eval_rollout = load_function(args.eval_function_path)
        self._position = CheckpointPosition(self.data_source, self.run.observers)
        self._parallel: dict[str, int] | None = None
        self.rollout_id = -1

    # Engines; the base class has more

    @ray.method(concurrency_group=CONTROL_GROUP)
    def wait_ready(self) -> None:
        """Wait until every engine serves."""
        self.engines.wait_ready()

    @ray.method(concurrency_group=CONTROL_GROUP)
    def get_job_state(self) -> JobState:
        """Return the state of engines and routers, for a page of metrics."""
        return self.engines.job_state()

    def check_weights(self, action: str) -> list[Any]:
        """Ask the weight checker of every engine to snapshot, reset_tensors or compare."""
        return self.engines.check_weights(action)

    # Work

    @ray.method(concurrency_group=CONTROL_GROUP)
    def set_train_parallel_config(self, config: dict[str, int]) -> None:
        """Set the sizes of the trainer's parallel groups; the train data is split accordingly."""
        self._parallel = config

    @ray.method(concurrency_group=CONTROL_GROUP)
    def get_num_rollout_per_epoch(self) -> int | None:
        """Return the rollouts in one pass over the prompts; None without a data set."""
        if not self.args.rollout_global_dataset:
            return None
        return len(self.data_source) // self.args.rollout_batch_size

    def generate(self, rollout_id: int) -> list[Box] | None:
        """Run one rollout; gives the train data of every data-parallel rank, boxed so that Ray passes it by reference.

        None with ``--debug-rollout-only``.
        """
        with telemetry.span("rollout", rollout=rollout_id):
            return self._generate(rollout_id)

    def _generate(self, rollout_id: int) -> list[Box] | None:
        start = time.monotonic()
        self.rollout_id = rollout_id
        self.run.begin(rollout_id)
        self._position.begin(rollout_id)
        self.engines.begin_rollout()
        groups, metrics = self._make_samples(rollout_id)
        check_samples(groups, f"The rollout function, {plug_ins_of_samples(self.args) or 'or a dump'}, gave")
        check_fan_out(groups)
        samples = list(leaf_samples(groups))
        seconds = time.monotonic() - start
        dump_rollout(self.args, rollout_id, samples)
        if self.args.debug_rollout_only:
            telemetry.samples("rollout", rollout_id=rollout_id, samples=samples, rewards=None)
            log_rollout(self.args, rollout_id, samples, metrics, seconds)
            return None
        if self._parallel is None:
            raise ProcessError("generate() was called before the trainer said how it is laid out")
        train_data = train_data_from_samples(self.args, samples)
        rewards = train_data.rewards if len(train_data.rewards) == len(samples) else None
        is_loaded = bool(self.args.load_debug_rollout_data)
        facts = {"samples": samples, "rewards": rewards, "is_loaded": is_loaded}
        telemetry.samples("rollout", rollout_id=rollout_id, **facts)
        per_rank = split_for_ranks(self.args, train_data, self._parallel)
        log_rollout(self.args, rollout_id, samples, metrics, seconds)
        transport = ray_transport(self.args)
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
        output = self.engines.run_watched(lambda: call_plugin(call, call_rollout_fn, *work, evaluation=False))
        if not isinstance(output, RolloutFnTrainOutput):
            raise ConfigError(
                f"--rollout-function-path {self.args.rollout_function_path} returned {type(output).__name__}; it must "
                "return a RolloutFnTrainOutput or a list of groups"
            )
        return output

    def eval(self, rollout_id: int) -> dict[str, float]:
        """Measure the present policy on the evaluation sets; gives the logged metrics."""
        if self.args.debug_train_only:
            return {}
        start = time.monotonic()
        self.run.begin(rollout_id)
        self.engines.begin_rollout()
        call = PluginCall("--eval-function-path", self.args.eval_function_path)
        work = (self.eval_rollout, self.args, rollout_id, self.data_source)
        with telemetry.span("evaluation", rollout=rollout_id):
            output = self.engines.run_watched(lambda: call_plugin(call, call_rollout_fn, *work, evaluation=True))
        dump_rollout(self.args, rollout_id, eval_samples(output), evaluation=True)
        after = rollout_id if self.rollout_id >= 0 else None  # rollout_id is 0 before the first one too
        telemetry.samples("evaluation", rollout_id=after, data=output.data)
        return log_eval(self.args, rollout_id, output.data, output.metrics, time.monotonic() - start)

    # Data position

    @ray.method(concurrency_group=CONTROL_GROUP)
    def save(self, rollout_id: int) -> None:
        """Write the data position after ``rollout_id``, whatever has been generated ahead of it since."""
        self._position.save(rollout_id)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def record_trained(self, rollout_id: int) -> None:
        """Record that the optimizer took the rollout's steps."""
        for observer in self.run.observers:
            observer.trained(rollout_id)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def record_published(self, rollout_id: int) -> None:
        """Record that the checkpoint after ``rollout_id`` is final; records of earlier ones can go."""
        for observer in self.run.observers:
            observer.published(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """Continue where the data stood after ``rollout_id``, with what observers recorded since."""
        self.data_source.load(rollout_id)
        for observer in self.run.observers:
            observer.start((self.args.start_rollout_id or 0) if rollout_id is None else rollout_id + 1)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def get_args(self) -> Namespace:
        """Return the args with what this process has found out: the routers and the number of engines."""
        return self.args

    def dispose(self) -> None:
        """Stop engines and routers in an orderly way."""
        self.engines.stop()
        observers, self.run.observers = self.run.observers, ()
        for observer in observers:
            observer.close()
        telemetry.stop()


RemoteRolloutManager = ray.remote(num_cpus=1, num_gpus=0, concurrency_groups={WATCH_GROUP: 1, CONTROL_GROUP: 4})(
    RolloutManager
)


def start_rollout_manager(args: Namespace, gpus: GpuSlice, parts: Parts = CORE) -> Any:
    """Start the rollout manager actor; its engines boot in the background until ``wait_ready`` is called."""
    return RemoteRolloutManager.options(
        runtime_env={"env_vars": COMMON_ACTOR_ENV | NOSET_VISIBLE_DEVICES},
        enable_tensor_transport=ray_transport(args) is not None,
    ).remote(args, gpus, parts=parts)
