"""An SGLang engine as a Ray actor, and the environment it is born with."""

from __future__ import annotations

from typing import Any

import ray

from slime.backends.sglang_utils.process_logs import run_name
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.ray.placement_group import GpuSlice, strategy_for
from slime.ray.ray_actor import RayActor
from slime.ray.utils import COMMON_ACTOR_ENV, NOSET_VISIBLE_DEVICES
from slime.ray.waiting import WATCH_GROUP, Watched
from slime.utils import env

ENGINE_ENV_DEFAULTS = {
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
    "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "true",
    "SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true",
    "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true",
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true",
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT": "true",
    # A health probe that generates a token while the memory is released kills the scheduler.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
}
"""A value that the driver's environment already has wins over these."""


class EngineActor(Watched, RayActor, SGLangEngine):
    """``SGLangEngine`` with what a Ray actor adds: a port probe, and answers while another call is under way."""

    @ray.method(concurrency_group=WATCH_GROUP)
    def describe_exit(self) -> str | None:
        """See ``SGLangEngine``."""
        return super().describe_exit()

    @ray.method(concurrency_group=WATCH_GROUP)
    def kill_server(self) -> None:
        """Kill the server's processes, even stopped ones; the actor stays."""
        if self.process is not None:
            self.process.stop()


RemoteEngine = ray.remote(concurrency_groups={WATCH_GROUP: 1})(EngineActor)


def start_engine_actor(gpus: GpuSlice | None, position: int, *arguments: Any, **keywords: Any) -> Any:
    """Start one engine actor on the GPU at ``position`` of the slice (None: an external engine without a GPU)."""
    variables = COMMON_ACTOR_ENV | NOSET_VISIBLE_DEVICES
    variables |= {name: env.get_str(name, default) or default for name, default in ENGINE_ENV_DEFAULTS.items()}
    variables["SLIME_LOG_RUN"] = run_name()
    share = 0.2 if gpus is not None else 0
    options: dict[str, Any] = {"num_cpus": share, "num_gpus": share, "runtime_env": {"env_vars": variables}}
    if gpus is not None:
        options["scheduling_strategy"] = strategy_for(gpus, position)
    return RemoteEngine.options(**options).remote(*arguments, **keywords)
