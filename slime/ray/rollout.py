"""The rollout manager: the one actor that owns engines, prompts and samples.

``generate`` turns prompts into train data, ``eval`` measures, ``save``/``load`` keep the position in the data.  What
the rollout function, the data source and the hooks do is theirs; here is only the order.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import ray

from slime.observability.logging_utils import configure_logger, finish_tracking
from slime.observability.rollout_dump import load_rollout_dump, save_rollout_dump
from slime.ray.engine_handles import UpdatableEngines
from slime.ray.health_monitor import RolloutHealthMonitor
from slime.ray.placement_group import GpuSlice, plan_gpus
from slime.ray.rollout_data import check_fan_out, flatten, split_for_ranks, train_data_from_samples
from slime.ray.rollout_logging import log_eval, log_rollout
from slime.ray.rollout_servers import (
    RolloutServer,
    ServerGroup,
    first_dead_engine,
    start_rollout_servers,
    wait_until_serving,
)
from slime.ray.utils import Lock
from slime.ray.waiting import WATCH_GROUP, Watched, wait_for
from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.utils.errors import ConfigError, EngineError
from slime.utils.http_utils import init_http_client
from slime.utils.misc import Box, load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

CONTROL_GROUP = "control"
"""Concurrency group of the short calls that must not queue behind a running ``generate``."""

ENGINE_CHECK_INTERVAL_S = 3.0
DEADLINE_MARGIN_S = 180.0
"""The rollout function has its own deadline and the better message; ours comes later, the driver's last."""


class RolloutManager(Watched):
    """Owner of engines, data source and rollout functions.

    Invariant: ``_data_states[k]`` is the data source's state just before ``generate(k)`` began, so that a save of
    rollout k-1 made while ``generate(k)`` already runs never counts its prompts as consumed.
    """

    def __init__(self, args: Namespace, gpus: GpuSlice) -> None:
        configure_logger(prefix="rollout")
        self.args = args
        self.servers: list[RolloutServer] = []
        self._starting: list[ray.ObjectRef] = []
        if not args.debug_train_only:
            self.servers, self._starting = start_rollout_servers(args, gpus)
            init_http_client(args)
        # Everything below happens while the engines boot.
        self.data_source = load_function(args.data_source_path)(args)
        self.generate_rollout = load_function(args.rollout_function_path)
        self.eval_rollout = load_function(args.eval_function_path)
        self._data_states: dict[int, bytes] = {}
        self._data_lock = threading.Lock()
        self._parallel: dict[str, int] | None = None
        self._engine_lock = None if args.debug_train_only else Lock.remote()
        self._monitors = (
            [RolloutHealthMonitor(args, group) for group in self._groups] if args.use_fault_tolerance else []
        )
        self.rollout_id = -1

    # Engines

    @property
    def _groups(self) -> list[ServerGroup]:
        return [group for server in self.servers for group in server.groups]

    @property
    def server(self) -> RolloutServer | None:
        """The first model's engines."""
        return self.servers[0] if self.servers else None

    @property
    def rollout_engines(self) -> list[Any]:
        """The live engines of every model."""
        return [engine for server in self.servers for engine in server.engines]

    def wait_ready(self) -> None:
        """Until every engine serves; gives their start-up error if one does not."""
        wait_until_serving(self.args, self._starting)
        self._starting = []

    @ray.method(concurrency_group=CONTROL_GROUP)
    def get_updatable_engines(self) -> UpdatableEngines:
        """The engines of the first model that takes weight updates."""
        offset = plan_gpus(self.args).rollout_offset
        trainer_gpus = self.args.actor_num_nodes * self.args.actor_num_gpus_per_node
        model = next((server for server in self.servers if server.config.update_weights), None)
        handles, counts, offsets, num_new = [], [], [], 0
        for group in model.groups if model else []:
            num_new += group.num_new_engines
            for engine, gpu_offset in zip(group.engines, group.engine_gpu_offsets, strict=True):
                if engine is not None:
                    handles.append(engine)
                    counts.append(group.num_gpus_per_engine)
                    offsets.append(offset + gpu_offset)
        return UpdatableEngines(
            handles=handles, gpu_counts=counts, gpu_offsets=offsets, num_new=num_new, num_trainer_gpus=trainer_gpus
        )

    @ray.method(concurrency_group=CONTROL_GROUP)
    def get_updatable_engines_and_lock(self) -> tuple[Any, ...]:
        """``(engines, lock, num_new_engines, gpu_counts, gpu_offsets, parallel_configs)`` of the updatable model."""
        engines = self.get_updatable_engines()
        configs = [{"tp_size": count // (self.args.sglang_pp_size or 1)} for count in engines.gpu_counts]
        lock = self._engine_lock
        return engines.handles, lock, engines.num_new, engines.gpu_counts, engines.gpu_offsets, configs

    @ray.method(concurrency_group=CONTROL_GROUP)
    def clear_updatable_num_new_engines(self) -> None:
        """The trainers have connected to every engine."""
        for group in self._groups:
            group.num_new_engines = 0

    def recover_updatable_engines(self) -> None:
        """Start engines again in the place of dead ones, with the memory state that a weight update expects."""
        for group in self._groups:
            alive = [engine for engine in group.engines if engine is not None]
            wait_until_serving(self.args, group.start())
            if group.needs_offload:
                fresh = [engine for engine in group.engines if engine not in alive]
                self._on_engines(fresh, "release_memory_occupation")
                self._on_engines(fresh, "resume_memory_occupation", tags=["weights"])

    def offload(self) -> None:
        """Engines on the trainers' GPUs give their memory away."""
        self.health_monitoring_pause()
        self._on_engines(self._offloadable(), "release_memory_occupation")

    def onload(self, tags: list[str] | None = None) -> None:
        """Engines on the trainers' GPUs take the memory of ``tags`` (None: all of it) back."""
        self._on_engines(self._offloadable(), "resume_memory_occupation", tags=tags)

    def onload_weights(self) -> None:
        """Room for the weights, which a push then fills."""
        self.onload(["weights"])

    def onload_kv(self) -> None:
        """Room for the KV cache and the CUDA graphs: after this an engine can generate."""
        self.onload(["kv_cache", "cuda_graph"])

    def _offloadable(self) -> list[Any]:
        return [e for group in self._groups if group.needs_offload for e in group.engines if e is not None]

    def _on_engines(self, engines: list[Any], method: str, **keywords: Any) -> list[Any]:
        refs = [getattr(engine, method).remote(**keywords) for engine in engines]
        return wait_for(refs, what=f"{method} of the engines", timeout_s=self.args.weight_update_timeout_s)

    def check_weights(self, action: str) -> list[Any]:
        """Ask every engine's weight checker to snapshot, reset_tensors or compare."""
        return self._on_engines(self.rollout_engines, "check_weights", action=action)

    def health_monitoring_pause(self) -> None:
        """Engines are about to be busy with something else than requests."""
        for monitor in self._monitors:
            monitor.pause()

    def health_monitoring_resume(self) -> None:
        """Engines serve again."""
        for monitor in self._monitors:
            monitor.resume()

    # Work

    @ray.method(concurrency_group=CONTROL_GROUP)
    def set_train_parallel_config(self, config: dict[str, int]) -> None:
        """How the trainer is laid out; the train data is split accordingly."""
        self._parallel = config

    @ray.method(concurrency_group=CONTROL_GROUP)
    def get_num_rollout_per_epoch(self) -> int | None:
        """Rollouts in one pass over the prompts; None without a data set."""
        if not self.args.rollout_global_dataset:
            return None
        return len(self.data_source) // self.args.rollout_batch_size

    def generate(self, rollout_id: int) -> list[Box] | None:
        """Run one rollout; gives the train data of every data-parallel rank, boxed so that Ray passes it by reference.

        None with ``--debug-rollout-only``.
        """
        start = time.monotonic()
        self.rollout_id = rollout_id
        set_current_rollout_id(rollout_id)
        self._remember_data_state(rollout_id)
        self.health_monitoring_resume()
        groups, metrics = self._make_samples(rollout_id)
        check_fan_out(groups)
        samples = flatten(groups)
        seconds = time.monotonic() - start
        if self.args.save_debug_rollout_data:
            save_rollout_dump(self.args.save_debug_rollout_data, rollout_id, samples)
        if self.args.debug_rollout_only:
            log_rollout(self.args, rollout_id, samples, metrics, seconds)
            return None
        if self._parallel is None:
            raise EngineError("generate() was called before the trainer said how it is laid out")
        train_data = train_data_from_samples(self.args, samples)
        per_rank, schedule = split_for_ranks(self.args, train_data, self._parallel)
        log_rollout(self.args, rollout_id, samples, metrics, seconds)
        return [Box(ray.put(data)) for data in per_rank]

    def _make_samples(self, rollout_id: int) -> tuple[list[Any], dict[str, Any] | None]:
        if self.args.load_debug_rollout_data:
            return load_rollout_dump(
                self.args.load_debug_rollout_data, rollout_id, subsample=self.args.load_debug_rollout_data_subsample
            ), None
        output = self._watching_engines(
            lambda: call_rollout_fn(self.generate_rollout, self.args, rollout_id, self.data_source, evaluation=False)
        )
        if not isinstance(output, RolloutFnTrainOutput):
            raise ConfigError(
                f"--rollout-function-path {self.args.rollout_function_path} returned {type(output).__name__}; it must "
                "return a RolloutFnTrainOutput or a list of groups"
            )
        return output.samples, output.metrics

    def eval(self, rollout_id: int) -> dict[str, float]:
        """Measure the present policy on the evaluation sets; gives the logged metrics."""
        if self.args.debug_train_only:
            return {}
        start = time.monotonic()
        set_current_rollout_id(rollout_id)
        self.health_monitoring_resume()
        output = self._watching_engines(
            lambda: call_rollout_fn(self.eval_rollout, self.args, rollout_id, self.data_source, evaluation=True)
        )
        if self.args.save_debug_rollout_data:
            samples: list[Sample] = [s for result in output.data.values() for s in result.get("samples", [])]
            save_rollout_dump(self.args.save_debug_rollout_data, rollout_id, samples, evaluation=True)
        return log_eval(self.args, rollout_id, output.data, output.metrics, time.monotonic() - start)

    def _watching_engines(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` beside a check that the engines still live.

        Without fault tolerance a dead engine ends the rollout at once, instead of after every request to it has been
        retried; with it, the health monitor deals with dead engines and the router with their requests.
        """
        executor = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        future = executor.submit(work)
        deadline = time.monotonic() + self.args.rollout_timeout_s + DEADLINE_MARGIN_S
        try:
            while True:
                try:
                    return future.result(timeout=ENGINE_CHECK_INTERVAL_S)
                except FutureTimeout:
                    if future.done():
                        raise
                if not self.args.use_fault_tolerance:
                    dead = self._dead_router() or first_dead_engine(self._groups, timeout_s=ENGINE_CHECK_INTERVAL_S)
                    if dead:
                        raise EngineError(
                            f"{dead}. The rollout cannot go on; start the job again to resume from the last "
                            "checkpoint, or pass --use-fault-tolerance to have engines restarted."
                        )
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"the rollout function has run for {self.args.rollout_timeout_s:.0f} s "
                        "(--rollout-timeout-s) and has not returned"
                    )
        finally:
            executor.shutdown(wait=False)

    def _dead_router(self) -> str | None:
        """A sentence about the first router that has ended; None while all of them run."""
        for server in self.servers:
            if server.router is not None and not server.router.is_alive():
                return f"the router {server.router.url} of model {server.config.name!r} has ended"
        return None

    # Data position

    def _remember_data_state(self, rollout_id: int) -> None:
        state_of = getattr(self.data_source, "state_dict", None)
        if state_of is None:
            return  # A user's own data source: its save() is called as it is.
        # Frozen by pickling: the state shares its samples with the rollout, which goes on changing them.
        frozen = pickle.dumps(state_of())
        with self._data_lock:
            self._data_states[rollout_id] = frozen
            for old in [known for known in self._data_states if known < rollout_id - 1]:
                del self._data_states[old]

    @ray.method(concurrency_group=CONTROL_GROUP)
    def save(self, rollout_id: int) -> None:
        """Write where the data stands after ``rollout_id``, whatever has been generated ahead of it since."""
        with self._data_lock:
            ahead = self._data_states.get(rollout_id + 1)
        if ahead is not None:
            self.data_source.save(rollout_id, state=pickle.loads(ahead))
        else:
            self.data_source.save(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """Continue where the data stood after ``rollout_id``."""
        self.data_source.load(rollout_id)

    def dispose(self) -> None:
        """Stop engines and routers in an orderly way."""
        for monitor in self._monitors:
            monitor.stop()
        refs = [engine.shutdown.remote() for engine in self.rollout_engines]
        ray.wait(refs, num_returns=len(refs), timeout=self.args.shutdown_timeout_s) if refs else None
        for server in self.servers:
            if server.router is not None:
                server.router.stop()
        finish_tracking(self.args)


RemoteRolloutManager = ray.remote(num_cpus=1, num_gpus=0, concurrency_groups={WATCH_GROUP: 1, CONTROL_GROUP: 4})(
    RolloutManager
)


def create_rollout_manager(args: Namespace, gpus: GpuSlice) -> Any:
    """Start the rollout manager actor; its engines boot in the background until ``wait_ready`` is called."""
    from slime.ray.utils import COMMON_ACTOR_ENV, NOSET_VISIBLE_DEVICES

    return RemoteRolloutManager.options(runtime_env={"env_vars": COMMON_ACTOR_ENV | NOSET_VISIBLE_DEVICES}).remote(
        args, gpus
    )
