"""A trainer rank as a Ray actor.  The driver knows its methods; only the rank's process imports the ``TrainWorker``.

Also starts the ranks and sets their initial environment, part of which (thread counts) cannot change later.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from slime.backends.sglang_utils import cpu_shim
from slime.flags.hook_checks import check_trainer_hooks
from slime.observability import telemetry
from slime.observability.pulse import Beat, Pulse
from slime.ray.gpus import GpuSlice, strategy_for
from slime.ray.parts import CORE, Part, Parts, load_all
from slime.ray.utils import (
    COMMON_ACTOR_ENV,
    NOSET_VISIBLE_DEVICES,
    RayActor,
    cluster_has_accelerators,
    lists_accelerators,
    one_node_environment,
)
from slime.ray.waiting import WATCH_GROUP, Watched, wait_for, watch
from slime.utils import env
from slime.utils.env import visible_index
from slime.utils.errors import HangError
from slime.utils.files import user_folder
from slime.utils.misc import Box

if TYPE_CHECKING:
    from slime.backends.train_worker import TrainWorker
    from slime.ray.engines.verbs import EngineList
    from slime.weights.push.participants import ExcludedEngine

FETCH_TIMEOUT_S = 3600
"""Deadline in seconds for one rank's train data (possibly tens of gigabytes) to arrive through the object store."""

PULSE_GROUP = "pulse"
"""Concurrency group in which a rank reports progress while it works."""


class TrainRayActor(Watched, RayActor):
    """One rank of a trainer.

    Args:
        worker: the class that does the work, or its ``module:name``, which only this process imports.
        parts: the run's implementations.
    """

    concurrency: Mapping[str, int] = {WATCH_GROUP: 1, PULSE_GROUP: 1}
    """Concurrency group -> number of threads."""

    def __init__(self, worker: type[TrainWorker] | str, parts: Parts = CORE) -> None:
        self.parts = parts
        self.heed_sigterm()
        if env.get_str("TORCHINDUCTOR_CACHE_DIR") is None:  # torch runs files in it, and any user can make the default
            env.export({"TORCHINDUCTOR_CACHE_DIR": str(user_folder() / "torchinductor")})
        self.worker: TrainWorker = (Part(worker).load() if isinstance(worker, str) else worker)()

    # Life

    def set_rendezvous(self, world_size: int, rank: int, master_addr: str, master_port: int, gpu_id: int) -> None:
        """Set the worker's rendezvous.  ``gpu_id`` is the GPU's physical index on its node, visible or not."""
        self.worker.set_rendezvous(world_size, rank, master_addr, master_port, visible_index(gpu_id))

    def init(self, args: Namespace, role: str, with_ref: bool) -> int:
        """Import and check the user's plug-ins for the trainer, then build and load the model.

        Returns:
            the id of the rollout to start with.
        """
        parts = self.parts
        telemetry.start(args, f"{role} {self.worker.rank}", load_all(parts.sinks))
        check_trainer_hooks(args)
        transforms = load_all(parts.transforms if role == "actor" else parts.critic_transforms)
        transport = parts.transport.load() if role == "actor" and parts.transport is not None else None
        guides = load_all(parts.guides if role == "actor" else ())
        return self.worker.init(args, role, with_ref, transforms=transforms, transport=transport, guides=guides)

    def get_parallel_config(self) -> dict[str, int]:
        """Return the parallel group sizes and this rank's position in them."""
        return self.worker.get_parallel_config()

    def flush_telemetry(self) -> None:
        """Flush this process's sinks; the process may be killed afterwards."""
        telemetry.flush()

    @ray.method(concurrency_group=PULSE_GROUP)
    def beat(self) -> Beat:
        """Return the rank's progress; answers while the rank works."""
        return Pulse().beat()

    def ask(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of the worker that is not part of ``TrainWorker``."""
        return getattr(self.worker, method)(*arguments, **keywords)

    # Training

    def train_boxed(self, rollout_id: int, boxes: list[Box], external_data: Any = None) -> Any:
        """Fetch this rank's share of the rollout and train on it."""
        dp_rank = self.worker.get_parallel_config()["dp_rank"]
        rank_batch = wait_for(
            boxes[dp_rank].inner, what=f"the train data of data-parallel rank {dp_rank}", timeout_s=FETCH_TIMEOUT_S
        )
        return self.worker.train(rollout_id, rank_batch, external_data=external_data)

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write the checkpoint of ``rollout_id``."""
        self.worker.save_model(rollout_id, force_sync)

    def publish_checkpoint(self, rollout_id: int) -> None:
        """Make the checkpoint of ``rollout_id`` the one to resume from."""
        self.worker.publish_checkpoint(rollout_id)

    # Weights

    def connect_engines(self, engines: EngineList) -> None:
        """Connect the weight updater to the engines."""
        self.worker.connect_rollout_engines(engines.unpacked(), engines.num_new)

    def update_weights(self) -> dict[str, float] | None:
        """Push the weights to the engines; return the metrics of the push on the main rank."""
        return self.worker.update_weights()

    def resend_weights(self) -> None:
        """Push the weights of the last push again."""
        self.worker.resend_weights()

    def write_weights(self) -> Any:
        """Write the weights where engines can read them."""
        return self.worker.write_weights()

    def excluded_engines(self) -> list[ExcludedEngine]:
        """Return the engines that the last push excluded."""
        return self.worker.excluded_engines()

    # Memory

    def sleep(self) -> None:
        """Offload the trainer's state from the GPU."""
        self.worker.sleep()

    def wake_up(self) -> None:
        """Load the trainer's state back onto the GPU."""
        self.worker.wake_up()

    def clear_memory(self) -> None:
        """Free cached memory."""
        self.worker.clear_memory()


def remote_class(worker: type[TrainWorker] | str, rank_class: type[TrainRayActor] = TrainRayActor) -> Any:
    """Return ``rank_class`` as a Ray actor class named after its worker, so that logs and ``ps`` show that name."""
    name = worker.rpartition(":")[2] if isinstance(worker, str) else worker.__name__
    named = type(name, (rank_class,), {"__module__": __name__})
    return ray.remote(num_gpus=1, concurrency_groups=dict(rank_class.concurrency))(named)


def start_ranks(
    worker: type[TrainWorker] | str,
    gpus: GpuSlice,
    names: Sequence[str],
    environment: Mapping[str, str],
    *,
    gpu_share: float,
    takes_tensors: bool = False,
    parts: Parts = CORE,
    rank_class: type[TrainRayActor] = TrainRayActor,
) -> list[Any]:
    """Start and watch the actors of a trainer's ranks, rank r on the r-th GPU; return them before they are up.

    Each rank reserves ``gpu_share`` of a GPU bundle.  With ``takes_tensors``, Ray's tensor transport sends it data.
    """
    remote = remote_class(worker, rank_class)
    options = {
        "num_cpus": gpu_share,
        "num_gpus": gpu_share,
        "runtime_env": {"env_vars": dict(environment)},
        "enable_tensor_transport": takes_tensors,
    }
    actors = [
        remote.options(scheduling_strategy=strategy_for(gpus, rank), **options).remote(worker, parts)
        for rank in range(len(names))
    ]
    for actor, name in zip(actors, names, strict=True):
        watch(actor, name)
    return actors


class Heartbeats:
    """Polls a trainer's ranks for progress while the driver waits for them, because a stopped process does not die.

    Args:
        ranks: rank name -> actor.
        hang_timeout_s: seconds that a rank may stay silent, and seconds that its current phase may last beyond twice
            the longest time that phase has taken.
    """

    def __init__(self, ranks: Mapping[str, Any], hang_timeout_s: float) -> None:
        self._ranks, self._timeout_s = ranks, hang_timeout_s
        self._beats: dict[str, Beat] = {}
        self._asked: dict[str, tuple[ray.ObjectRef, float]] = {}

    def begin(self) -> None:
        """Drop earlier polls: nobody collected their answers between waits."""
        self._asked.clear()

    def check(self) -> None:
        """Collect the answers that have arrived and poll again.  Call every few seconds; never blocks.

        Raises:
            HangError: a rank is silent or stuck; the message names the slowest ranks.
        """
        now = time.monotonic()
        for name, actor in self._ranks.items():
            if name in self._asked and ray.wait([self._asked[name][0]], timeout=0)[0]:
                self._beats[name] = self._answer(self._asked.pop(name)[0], name)
            if name not in self._asked:
                self._asked[name] = actor.beat.remote(), now
        silent_s = {name: now - asked_at for name, (_, asked_at) in self._asked.items()}
        silent = max(silent_s, key=lambda name: silent_s[name])
        overdue = [name for name, beat in self._beats.items() if beat.overdue_s() > self._timeout_s]
        if silent_s[silent] > self._timeout_s or (overdue and silent_s[silent] > self._timeout_s / 2):
            raise HangError(
                f"{silent} has not answered for {silent_s[silent]:.0f} s (--trainer-hang-timeout-s "
                f"{self._timeout_s:g}): its process or its node is stopped. {self._where()}"
            )
        if overdue:
            behind = min(self._beats, key=lambda name: self._beats[name].num_marks)
            beat = self._beats[overdue[0]]
            raise HangError(
                f"{overdue[0]} has been in a {beat.phase} for {beat.elapsed_s:.0f} s; the longest took "
                f"{beat.longest_s:.1f} s; --trainer-hang-timeout-s allows {self._timeout_s:g} s beyond twice that. "
                f"The rank furthest behind is {behind}. {self._where()}"
            )

    def _answer(self, ref: ray.ObjectRef, name: str) -> Beat:
        try:
            return ray.get(ref, timeout=10)
        except RayError:  # the rank died, which the surrounding wait reports
            return self._beats.get(name, Beat(0, None, 0.0, None))

    def _where(self) -> str:
        """Describe the progress of the four slowest ranks."""
        slowest = sorted(self._beats.items(), key=lambda item: item[1].num_marks)[:4]
        return "Slowest first: " + "; ".join(
            f"{name} at mark {beat.num_marks} ({beat.phase or 'between steps'})" for name, beat in slowest
        )


def trainer_environment(args: Namespace, world_size: int) -> dict[str, str]:
    """Return the environment of one of ``world_size`` trainer ranks; ``--train-env-vars`` overrides everything."""
    variables = {
        **COMMON_ACTOR_ENV,
        **NOSET_VISIBLE_DEVICES,
        **({} if args.rollout_external else one_node_environment()),  # external engines may be on other hosts
        **kernel_environment(),
    }
    has_accelerators = cluster_has_accelerators()
    # Ray defaults to one thread per worker.  With a GPU, host threads verify checkpoints and run CPU-offloaded Adam.
    ranks_of_host = min(world_size, args.actor_num_gpus_per_node) if has_accelerators else world_size
    variables["OMP_NUM_THREADS"] = str(max(1, _cores_of_host() // ranks_of_host))
    if not has_accelerators and not args.debug_train_only:
        # The trainer uses SGLang's wire format, so it imports SGLang, which needs the shim here.
        variables["PYTHONPATH"] = cpu_shim.child_environment()["PYTHONPATH"]
    return variables | {name: str(value) for name, value in args.train_env_vars.items()}


def _cores_of_host() -> int:
    """Return the smallest core count, as Ray counts, of the nodes with accelerators; without any, this host's count.

    Not simply this host's, because the driver may run on a small node without GPUs.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores = [node.get("CPU", 1) for node in nodes if lists_accelerators(node)]
    return int(min(cores, default=os.cpu_count() or 1))


def kernel_environment() -> dict[str, str]:
    """Return the variables that affect a trainer's numerics and kernel order."""
    return {
        # SGLang runs NCCL without cuMem; both ends of a weight broadcast must agree.
        "NCCL_CUMEM_ENABLE": env.get_str("NCCL_CUMEM_ENABLE", "0") or "0",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": env.get_str("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1") or "1",
        # A single hardware queue keeps kernels in launch order, on which Megatron's communication overlap relies.
        "CUDA_DEVICE_MAX_CONNECTIONS": env.get_str("CUDA_DEVICE_MAX_CONNECTIONS", "1") or "1",
    }
