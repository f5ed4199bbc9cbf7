"""The rollout manager: the one actor that owns engines, prompts and samples.

The driver imports this class only for its method names.  The manager's process also imports the engines
(``slime.ray.engines``) and the work (``slime.ray.rollout_work``).
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

import ray

from slime.observability import telemetry
from slime.observability.text_log import configure_logger, level_of
from slime.ray.engines.verbs import CONTROL_GROUP, EngineVerbs
from slime.ray.gpus import GpuSlice
from slime.ray.parts import CORE, Parts, load_all
from slime.ray.utils import COMMON_ACTOR_ENV, NOSET_VISIBLE_DEVICES, ray_transport
from slime.ray.waiting import WATCH_GROUP
from slime.utils.misc import Box

if TYPE_CHECKING:
    from slime.ray.engines.fleet import EngineFleet


def driver_bar(title: str, total: int) -> Any:
    """Return a bar that Ray's client draws on the driver's terminal, beside what it prints."""
    from ray.experimental import tqdm_ray

    return tqdm_ray.tqdm(desc=title, total=total, unit="groups", flush_interval_s=0.0)


class RolloutManager(EngineVerbs):
    """Owner of the engines, the data source and the rollout functions.

    Args:
        args: the run's arguments.
        gpus: the engines' GPUs.
        engines: the engines; None to start them here.
        parts: the run's implementations.
    """

    def __init__(
        self, args: Namespace, gpus: GpuSlice, engines: EngineFleet | None = None, parts: Parts = CORE
    ) -> None:
        from slime.ray.distributed_post import start_distributed_post
        from slime.ray.engines.fleet import EngineFleet
        from slime.ray.engines.models import start_rollout_servers
        from slime.ray.rollout_work import RolloutWork
        from slime.rollout.waiting import LongWait
        from slime.utils.async_utils import StallTimeout
        from slime.utils.http_utils import init_http_client

        configure_logger(prefix="rollout", level=level_of(args))
        self.args = args
        if vars(args).get("draws_bars"):
            LongWait.make_bar = driver_bar
        telemetry.start(args, "rollout manager", load_all(parts.sinks))
        StallTimeout.seconds = args.loop_stall_timeout_s
        if engines is None:  # starts in the background; wait_ready waits for it
            start = start_rollout_servers if parts.servers is None else parts.servers.load()
            engines = EngineFleet(args, () if args.debug_train_only else start(args, gpus))
        self.engines = engines
        if not args.debug_train_only:
            init_http_client(args)
            if args.use_distributed_post:
                start_distributed_post(args)
        self.work = RolloutWork(args, self.engines, load_all(parts.observers))  # reads data while the engines boot

    @ray.method(concurrency_group=CONTROL_GROUP)
    def set_train_parallel_config(self, config: dict[str, int]) -> None:
        """Set the sizes of the trainer's parallel groups, by which the train data is split."""
        self.work.parallel = config

    @ray.method(concurrency_group=CONTROL_GROUP)
    def get_num_rollout_per_epoch(self) -> int | None:
        """Return the number of rollouts in one pass over the prompts; None without a data set."""
        if not self.args.rollout_global_dataset:
            return None
        return len(self.work.data_source) // self.args.rollout_batch_size

    def generate(self, rollout_id: int) -> list[Box] | None:
        """Run one rollout and return its train data, one Box per data-parallel rank so that Ray passes references.

        Returns None with ``--debug-rollout-only``.
        """
        with telemetry.span("rollout", rollout=rollout_id):
            return self.work.generate(rollout_id)

    def eval(self, rollout_id: int) -> dict[str, float]:
        """Evaluate the current policy on the evaluation sets; return the logged metrics."""
        return {} if self.args.debug_train_only else self.work.evaluate(rollout_id)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def save(self, rollout_id: int) -> None:
        """Write the data position after ``rollout_id``, even if later rollouts have begun."""
        self.work.position.save(rollout_id)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def record_trained(self, rollout_id: int) -> None:
        """Notify observers that the trainer has trained on the rollout."""
        for observer in self.work.run.observers:
            observer.trained(rollout_id)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def record_published(self, rollout_id: int) -> None:
        """Notify observers that the checkpoint after ``rollout_id`` is published; they may drop earlier records."""
        for observer in self.work.run.observers:
            observer.published(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """Restore the data position after ``rollout_id``, and what observers recorded after it."""
        self.work.load(rollout_id)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def get_args(self) -> Namespace:
        """Return the args, completed with values known only to this process: routers and number of engines."""
        return self.args

    def dispose(self) -> None:
        """Stop engines and routers cleanly, close observers and flush telemetry."""
        self.engines.stop()
        self.work.close()
        telemetry.stop()


RemoteRolloutManager = ray.remote(num_cpus=1, num_gpus=0, concurrency_groups={WATCH_GROUP: 1, CONTROL_GROUP: 4})(
    RolloutManager
)


def start_rollout_manager(args: Namespace, gpus: GpuSlice, parts: Parts = CORE) -> Any:
    """Start the rollout manager actor; its engines boot in the background until ``wait_ready`` is called."""
    return RemoteRolloutManager.options(
        runtime_env={"env_vars": COMMON_ACTOR_ENV | NOSET_VISIBLE_DEVICES},
        enable_tensor_transport=ray_transport(args.rollout_data_transport) is not None,
    ).remote(args, gpus, parts=parts)
